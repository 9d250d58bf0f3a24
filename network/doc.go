// Package network attaches pods to networks and detaches them, by CNI plugins.
//
// It owns:
//   - the network configuration, read from polled directories and held as immutable snapshots behind atomic
//     pointers (directory.go, config.go, default.go, masquerade.go), and the plugins' last answer to STATUS;
//   - every run of a plugin, through go-cni (GC through libcni) and package runner, with a time limit (run.go, left.go);
//   - attachments: how they begin and are kept on disk (attach.go), and how they end (detach.go, left.go).
//
// An attachment is what ADD made for one sandbox, which it may outlive:
//
//	journalled --ADD--> attached --Detach--> releasing --DEL--> removed
//	     \____________________________________/   ^ |
//	       (ADD failed or never ended)            |_| DEL failed: again, later
//
// The journal holds it on disk, with the configuration and the arguments of its ADD, before ADD runs and until
// DEL of every plugin has succeeded, or is given up. A failed DEL is retried in the background, over restarts
// too, and the namespace, which DEL needs, stays until then. If ADD never succeeded, DEL is tried a bounded number
// of times, and the namespace goes after the last of them or when the same pod is tried again.
//
// Each attachment has a lock, held while a plugin runs for it: ADD, DEL and CHECK of one sandbox never
// overlap (CNI SPEC, "Lifecycle & Ordering"). CNI.mu guards the map of attachments, their records and the pod
// CIDR; nothing runs and nothing is written while it is held.
package network
