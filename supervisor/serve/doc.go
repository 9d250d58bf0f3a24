// Package serve is the resident process that containers have as their
// parent: it serves the protocol of package api, keeps what becomes of each
// container, and adopts the containers of one that died. It makes no process itself that
// a container can reach: starters do (package starter), with libcontainer or by a program
// with runc's command line, and pauses and plain execs are launched (package launch).
// Streams are moved by package stdio. A process is known by its pidfd; waiting for one
// parks a goroutine and no thread.
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
//	DIR/io/ID.stdout.spool what was read from it and is not in the log yet
//	DIR/shim.log           what the supervisor logs, see package client
//	DIR/exits/ID.json      how it ended
//
// Locks, in the order in which they are taken: container.op (one change at a time
// of one container, may be held for long), execCgroup.mu (while an exec is killed or its
// cgroup removed), Supervisor.mu, container.mu, broker.mu. The last three are held for
// moments only: across a read of a cgroup's file, or the write of a record to the volatile
// directory, and nothing that a container can hold up.
package serve
