// Package cgroup is what the supervisor and its starters do with the cgroups of one
// container, which [Paths] names: end and remove what is in them, and keep each exec in
// one of its own ([Execs]).
//
// Locks: Exec.mu, while an exec is killed or removed; below it Execs.mu, for moments only.
package cgroup
