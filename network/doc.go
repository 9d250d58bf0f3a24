// Package network attaches pods to networks and detaches them, by CNI plugins.
//
// It owns three things:
//
//   - the network configuration: read from a directory, which is polled, and held as
//     immutable snapshots (directory.go, config.go, default.go, masquerade.go), with the
//     answer of the plugins to STATUS kept in a cache;
//   - every run of a plugin, through go-cni and package runner, each with a
//     time limit after which everything in its cgroup is ended (run.go, left.go);
//   - the journal of attachments (journal.go, attach.go, detach.go, gc.go).
//
// An attachment is what ADD made for one sandbox. Its life is longer than
// that of the sandbox:
//
//	journalled --ADD--> attached --Detach--> releasing --DEL--> removed
//	     \____________________________________/   ^ |
//	       (ADD failed or never ended)            |_| DEL failed: again, later
//
// It is in the journal, on disk, before ADD runs, with the configuration and
// the arguments of that ADD, and it is removed only after every plugin of the
// chain said that its DEL succeeded. A DEL that fails is retried in the background,
// over restarts too. As long as the attachment exists, so does the namespace, which
// DEL needs. One whose ADD never succeeded is different: its DEL is tried a bounded
// number of times, and its namespace goes when the same pod is tried again.
//
// # Locks
//
// Each attachment has a lock of its own, held while a plugin runs for it, so
// that ADD, DEL and CHECK of one sandbox are never parallel (CNI SPEC,
// "Lifecycle & Ordering"). CNI.mu guards the map of attachments, what is in their
// records, and the pod CIDR, and is never held while anything runs or is written. A new
// configuration is a new snapshot behind an atomic pointer; readers never wait.
package network
