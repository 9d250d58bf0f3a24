// Package launch starts processes in containers without libcontainer: pauses, up to the exec barrier, and
// execs. What it cannot start (CanPause, CanExec) libcontainer does, in a starter; there is no fallback.
//
// The supervisor makes a list of system calls, and forks a program of 1.4 KiB without a libc (launch.c),
// which makes them, into its own namespaces and cgroup, where no container can stop it. This first process
// does what needs the node, sets its labels, and forks a helper into the container's cgroup (version 2) or
// enters that itself (version 1); with systemd's driver a pause has no helper, and systemd moves the first process. There all namespaces are joined and the node's descriptors closed, and only
// then is the process forked that a container sees. This waits until the supervisor owns it
// (process.Parent), makes the remaining calls and executes its program. A pause is forked with its own
// namespaces and a copy of the mounts that all pauses share. The parents live until then, so that the pid is
// not reused, and are killed.
//
// A launch ends with its context, whatever a container does to the process (SIGSTOP, a frozen cgroup, a
// mount that hangs); the error says what was waited for.
//
// Locks: filters.mu is held while a seccomp profile is compiled, mounts.mu while the mounts are made. An
// attempt belongs to one goroutine.
package launch
