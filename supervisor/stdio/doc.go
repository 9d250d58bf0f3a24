// Package stdio moves the standard streams of processes: a container's output to its log (package crilog) and
// to attached clients, an exec's to the client that asked for it. It also holds terminals and stdin.
//
// A container waits for its log's disk, and for an attached client as long as that takes something within some
// seconds: else it is dropped. An exec waits for the client that reads its output, as for a pipe.
//
// Locks: input.mu guards what a process reads, and all of Pipes; Fanout.mu guards the clients. Both are held
// for moments only and never together.
package stdio
