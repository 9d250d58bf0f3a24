// Package launch starts a program behind a list of system calls.
//
// A process that is to become a container's has to make a hundred system calls
// in its namespaces before it executes the program. libcontainer makes them in
// Go, for any container there can be: three processes and the Go runtime are
// started for them, which costs far more than the calls. Here the
// caller makes the list of calls (Calls), and Program, 1 KiB without a libc,
// makes the calls and decides nothing.
//
// Program gets the list from descriptor Socket and answers there: what a call
// of the list writes, or which call failed (ReadAnswer).
//
// Nothing here has a lock; a list belongs to the one that makes it.
package launch
