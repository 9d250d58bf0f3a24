// Package children is the one place where the supervisor waits for its children:
// starters, launched processes, and what these leave to it as their sub-reaper,
// which are containers and the processes in them.
//
// A child has an owner before it can be reaped: [Children.Start] holds the lock
// while it forks, and a process that a child of ours has made is owned
// ([Children.Own]) while its parent still lives, so that its exit waits for that
// parent's end. What has no owner is an orphan of a container; it is reaped and
// forgotten.
//
// No other part of the process may wait for a child, os/exec included.
//
// Locks: Children.mu, for moments only. A fork is done under it: of a program of
// ours, in our own namespaces and cgroup, where nothing can stop it.
package children
