// Package crash kills the daemon, its shim and its requests at every step of a pod's life, and asks what is left
// (matrix_test.go); and it starts the daemon on what a crash, a reboot, a full disk or someone's hand may leave (the
// other files). All is real; the daemon is built with the tag "failpoints".
//
// Every case of the matrix runs on a node where another pod is Ready all the time, in a network with three addresses:
// one that is not given back is missed soon. The numbers of properties, as P12, are those of
// docs/contributors/properties.md.
package crash
