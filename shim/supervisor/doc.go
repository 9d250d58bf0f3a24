// Package supervisor is the resident process that containers have as their
// parent: it serves the protocol of package api, keeps what becomes of each
// container, and adopts the containers of one that died. Processes are made by
// package runtime, their streams moved by package stdio.
//
// A container is created (init waits at the exec barrier), started, exited and
// deleted; its state follows from the facts startedAt and exit. Its directory:
//
//	DIR/lock               held as long as a supervisor serves DIR
//	DIR/shim.sock          control, see package api
//	DIR/stream.sock        data
//	DIR/events.sock        what containerd's shims publish
//	DIR/containers/ID/     libcontainer's state
//	DIR/records/ID.json    what a successor needs to adopt the container
//	DIR/records/ID.copy    the same, as it was when the container was made
//	DIR/records/ID.bad     a record that cannot be used
//	DIR/io/ID.stdout       output, a fifo that pause and the daemon hold open too
//	DIR/journal.1          see package journal
//	DIR/exits/ID.json      how it ended
//
// Locks, in the order in which they are taken: Supervisor.changes (read-held
// by whatever an upgrade must not cut in two), container.op (one change at a
// time of one container, may be held for long), container.ending and
// container.loading (while commands are ended, and the state of a runtime is
// read), Supervisor.mu, container.mu, broker.mu. The last three are held for
// moments only, never across a system call that can block, so that a hung
// container delays only itself.
package supervisor
