// Package crash kills the daemon, its shim and its requests at every step of a
// pod's life, and asks what is left (matrix_test.go); and it starts the daemon
// on what a crash, a reboot, a full disk or someone's hand may leave (the
// other files).
//
// The daemon, the shim and the plugins are the real ones, the daemon built with
// the tag "failpoints" (make failpoints). Every case of the matrix runs on a
// node where another pod is Ready all the time, in a network with three
// addresses: one that is not given back is missed soon.
//
// The numbers of properties, as P12, are those of docs/properties.md; the tests
// of TestProperty… bear theirs. Those of the matrix:
//
//	P1  a kill around netns: no namespace that no listed sandbox owns
//	P2  a kill between record and ADD: DEL has run
//	P3  a kill, or an error, between the plugins of a chain, in ADD and in DEL
//	P4  a kill between ADD and the result on disk
//	P5  a kill of daemon, shim or both, from prepare to Ready
//	P6  a kill, or an error, at each step of Stop, Remove, undo and recovery
//	P8  the name is free at once
//	P11 an error of the first, middle, last plugin; what the error says
//	P15 a cancelled request, a deadline that passed: the work continues
//	P16 the retry joins it
//	P23 other pods stay as they are, byte for byte in their status
package crash
