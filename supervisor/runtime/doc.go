// Package runtime is what the supervisor does with containers and their processes. It
// makes none itself: starters do (package starter), with libcontainer or by a program
// with runc's command line, and pauses and plain execs are launched (package launch).
//
// A [Container] is known by its [Facts] alone, which the supervisor keeps in its record,
// so one that an earlier supervisor has made is the same. It is created (init waits at
// the exec barrier), started and deleted; its streams and its exit are the caller's to
// keep. A [Process] is known by its pidfd. Waiting for one parks a goroutine and no
// thread.
//
// Each call that waits for a process of a container ends with its context, and with it
// what it had started.
//
// Locks: none. Calls on one container must not overlap, except Exec, EndExecs and
// those on its processes.
package runtime
