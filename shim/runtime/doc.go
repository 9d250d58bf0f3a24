// Package runtime makes containers and the processes in them. It is the only
// package that imports libcontainer; above it, everything speaks OCI
// runtime-spec.
//
// Runtime and Container are the seam for other runtimes: create, load and
// features are of a Runtime; start, exec, signal, update and delete of a
// Container. Builtin is libcontainer in this process, Command a program with
// runc's command line, Task a shim of containerd's. What the latter two say of
// processes and cgroups is checked before it is used (foreign.go).
//
// A container is created (init waits at the exec barrier), started and deleted; its
// streams and its exit are the caller's to keep. Pauses that need no more than a
// list of system calls are launched without libcontainer's init (launchable.go). A
// Process is known by its pidfd. Waiting for one parks a goroutine and no thread.
//
// Locks: Builtin.children.starting is held (for reading) while a process
// starts, because only then it is not known yet which children have an owner;
// execCgroups.mu, runs.mu, Task.mu and taskContainer.mu for moments only. Calls
// on one container must not overlap, except Exec, Signal and those on its
// processes.
package runtime
