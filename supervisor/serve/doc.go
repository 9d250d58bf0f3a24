// Package serve is the supervisor, the resident parent of containers. It serves the protocol of package api,
// records how containers end, and adopts those of a supervisor that died. It forks nothing that a container
// can reach: starters (package starter) use libcontainer or a runtime, a program with runc's command line, and
// package launch makes pauses and plain execs. Package stdio moves streams. A process is known by its pidfd; waiting
// for one parks a goroutine and no thread.
//
// A container is created (init waits at the exec barrier), started, exited and deleted; its state follows
// from the facts startedAt and exit. The supervisor's directory:
//
//	DIR/lock               held as long as a supervisor serves DIR
//	DIR/about.json         which build serves, and what it knows
//	DIR/shim.sock          control, see package api
//	DIR/stream.sock        data
//	DIR/exec.sock          execs
//	DIR/containers/ID/     libcontainer's state, or that of a launched pause
//	DIR/oci/RUNTIME/       the states of a runtime's containers
//	DIR/records/ID.json    what is known of the container, also by a successor
//	DIR/io/ID.stdout.spool output that was read and is not in the log yet
//	DIR/shim.log           what the supervisor logs, see package client
//	DIR/exits/ID.json      how it ended
//
// A container writes its output to fifos that the daemon holds open, too; they exist until the log has all. They are in
// the small tmpfs of the pod, because CAP_DAC_READ_SEARCH can open all files of a file system of which a container has
// one (open_by_handle_at(2)).
//
// The locks, in the order in which they are taken:
//
//	lock                    held while                                who waits, and how long
//	container.op            a change of the container                 changes of it; their contexts and operationLimit
//	execCgroup.mu           an exec is killed                         the end of that exec
//	Supervisor.mu           memory is changed, cgroups are looked up  nobody
//	container.mu, broker.mu memory is changed                         nobody
//	process.Parent.mu       a child is forked or reaped               forks; nothing that a container can delay
//	Starters.mu             a starter is forked                       the next operation
//	launch: filters.mu      a profile is compiled, some milliseconds  launches with filters
//	launch: mounts.mu       the mounts of pauses are made             pauses, if the disk of root hangs
//	crilog.Log.mu           a log is written or reopened              that log alone, if its disk hangs
package serve
