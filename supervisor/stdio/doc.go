// Package stdio moves the standard streams of processes: a container's output
// to its log and to attached clients, an exec's to the client that asked for
// it, and holds terminals and stdin. The log's form is package crilog's.
//
// A container waits for its log's disk alone: an attached client that is too slow is
// dropped. An exec waits for the client that reads its output, as for a pipe.
//
// Locks: input.mu guards what a process reads, Fanout.mu the clients; both are held for
// moments only and never together.
package stdio
