// Package launch starts processes in containers without libcontainer: pause, up to
// the exec barrier, and execs. What is rare is left to libcontainer, in a starter
// (CanPause, CanExec); nothing is tried in both ways.
//
// The supervisor makes the list of the system calls that a process makes before it
// executes its program, and a program of 1.3 KiB without a libc (launch.c) makes them.
//
// The supervisor forks that program into its own namespaces and cgroup, where no
// container can stop what it waits for. The first process does what needs the node
// and gives itself the labels. It forks a helper into the container's cgroup (version 2),
// or enters that itself (version 1). There all namespaces are joined, and all that is of the
// node is closed but the socket. Only then the process is forked that a container sees: it
// waits until the supervisor is its owner (process.Parent), goes on with the list and
// executes its program. A pause, which no container sees yet, is forked with the namespaces
// that are its own, and with a copy of the mounts that all pauses have. The parents live until
// then, so that its pid is no other's, and are killed.
//
// A launch lasts as long as its context: whatever a container does to the process
// (SIGSTOP, a frozen cgroup, a mount that hangs), it ends with an error that says what
// was waited for.
//
// Locks: filters.mu, while a seccomp profile is compiled; mounts.mu, while the mounts are
// made; an attempt belongs to one goroutine.
package launch
