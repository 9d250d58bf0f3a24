// Package engine is what a starter does: it makes a container, or a process in one,
// with libcontainer, or by a program with runc's command line, and what else only
// these can do: updates, hooks, removals. It is the only package that imports
// libcontainer; [Main] runs in `minicri-shim start` alone, never in the supervisor.
//
// A container is created (init waits at the exec barrier), started and deleted, as
// runtime-spec has it. Each call is one process's only one, so nothing here has a
// lock, a limit or a way to be aborted: the supervisor ends a starter with all that it
// has started (package starter).
//
// What another program says of its processes and cgroups is not believed: both are
// checked before the supervisor gets to kill by them (program.go).
package engine
