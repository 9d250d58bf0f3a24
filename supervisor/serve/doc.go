// Package serve is the resident process that containers have as their
// parent: it serves the protocol of package api, keeps what becomes of each
// container, and adopts the containers of one that died. Processes are made over
// package runtime, by others; their streams are moved by package stdio.
//
// A container is created (init waits at the exec barrier), started, exited and
// deleted; its state follows from the facts startedAt and exit. Its directory:
//
//	DIR/lock               held as long as a supervisor serves DIR
//	DIR/about.json         which build serves, and what it knows
//	DIR/shim.sock          control, see package api
//	DIR/stream.sock        data
//	DIR/containers/ID/     libcontainer's state, or that of a launched pause
//	DIR/oci/PROGRAM/       the states of a program with runc's command line
//	DIR/records/ID.json    what is known of the container, also by a successor
//	DIR/io/ID.stdout       output, a fifo that the daemon holds open too
//	DIR/journal.1          see package journal
//	DIR/shim.log           what the supervisor logs, see package client
//	DIR/exits/ID.json      how it ended
//
// Locks, in the order in which they are taken: container.op (one change at a time
// of one container, may be held for long), container.ending (while the execs of an earlier
// supervisor are ended), Supervisor.mu, container.mu, broker.mu. The last three are held for
// moments only: across a read of a cgroup's file, or the write of a record to the volatile
// directory, and nothing that a container can hold up.
package serve
