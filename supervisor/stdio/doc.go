// Package stdio moves the standard streams of processes: a container's output
// to its log and to attached clients, an exec's to the client that asked for
// it, and holds terminals and stdin. The log's form is package crilog's.
//
// Nothing waits for a client: one that is too slow is dropped. A container waits
// for its log's disk alone.
//
// Locks: Streams.mu guards stdin, Fanout.mu the clients; both are held for
// moments only and never together.
package stdio
