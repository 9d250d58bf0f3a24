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
// ADD, DEL and CHECK of one sandbox never overlap (CNI SPEC, "Lifecycle & Ordering"). The locks:
//
//	lock                  held while                               who waits, and how long
//	attachment.lock       a plugin runs for the attachment         calls for the same sandbox; their contexts
//	gate (by network)     GC of the network runs                   ADD and DEL; gcWait, then the GC is ended
//	CNI.slots             a DEL in the background runs             other DELs in the background
//	Directory.reading     the directory is read, rules are changed the polling goroutine; pods for latestLimit
//	forward.changing      programs list and change rules           the polling goroutine
//	masquerade.mu         nft runs, for nftLimit at most           the polling goroutine
//	CNI.mu and others     memory is changed                        nobody: nothing runs, nothing is written
package network
