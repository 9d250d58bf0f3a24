// Package launch starts processes in containers without libcontainer: pauses, up to the exec barrier, and
// execs. What it cannot start (CanPause, CanExec) libcontainer does, in a starter; there is no fallback. Starters take
// the names of limits and the session keyring from here.
//
// The supervisor makes a list of system calls and forks a program of 1.4 KiB without a libc (launch.c), which
// makes them. There are up to three processes:
//
//   - The first process starts in the namespaces and the cgroup of the supervisor, where no container can stop it.
//     It does what needs the node, and sets the labels.
//   - The helper is its child, cloned into the container's cgroup (version 2). With version 1 the first process
//     enters the cgroup itself; a pause of systemd's driver is moved by systemd. Neither has a helper.
//   - The launched process is cloned by the last of them, after that has joined all namespaces and, for an exec,
//     closed the node's descriptors: a container sees no other process of a launch. It waits until the supervisor
//     owns it (process.Parent), makes the remaining calls and executes its program. A pause is cloned into
//     namespaces of its own, with a copy of the mounts that all pauses share.
//
// The parents live until the supervisor owns the process, so that no pid is reused. They end before the process
// executes its program: a program may ask for a signal when its parent ends.
//
// A launch ends with its context, whatever a container does to the process (SIGSTOP, a frozen cgroup, a
// mount that hangs); the error says what was waited for.
//
// Locks: filters.mu is held while a seccomp profile is compiled, mounts.mu while the mounts are made. An
// attempt belongs to one goroutine.
package launch
