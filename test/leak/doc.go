// Package leak finds what a runtime left behind.
//
// It asks the machine itself, never the runtime: the kernel by /proc, netlink
// and cgroup directories, the CNI plugins by their files and rules. [Take]
// writes down what is there within a [Scope], [Diff] returns what one snapshot
// has more than another, and [Settle] gives the kernel time for what it removes by
// itself: zombies, the second end of a veth pair.
//
//	before, err := leak.Take(ctx, scope)
//	... pods come and go ...
//	leaks, err := leak.Settle(ctx, before, scope)
//
// [Diff] with its arguments exchanged returns what was lost: something that
// belonged to another and was removed too.
//
// Links and rules are those of the calling thread's network namespace, mounts
// those of its mount namespace. A caller who looks into another namespace
// locks its thread first.
//
// Snapshots are values, nothing in the package is shared or locked. A file or
// process that goes away while it is looked at is not there. What may not be
// read (on hardened machines the namespaces of process 1) cannot be ours and
// is left out.
package leak
