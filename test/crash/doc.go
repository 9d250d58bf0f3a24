// Package crash kills the daemon, its shim and its requests at every step of a
// pod's life, and asks what is left (matrix_test.go); and it starts the daemon
// on what a crash, a reboot, a full disk or somebody's hand may leave (the
// other files). The numbers in the names of tests, as P12, are those of the
// properties in the table below.
//
// The daemon, the shim and the plugins are the real ones, the daemon built with
// the tag "failpoints" (make failpoints). Every case of the matrix runs on a
// node where another pod is Ready all the time, in a network with three
// addresses: an address that is not given back is missed at once.
//
//	P1-P6    a kill at each step of Run, Stop, Remove, between plugins of a chain
//	P8       the name can be used again, names of listed sandboxes stay reserved
//	P9       records that cannot be read
//	P11      a chain that fails in the middle
//	P15      a cancelled request
//	P17, P18 a namespace that is gone, a reboot
//	P23      addresses after a restart
//	P30      the clock
//	P48, P49 full and broken disks, no descriptors; many pods
package crash
