// Package image owns the node's images and the snapshots made from them. It runs
// containerd's stores, resolver and unpacker as libraries; callers see plain types.
//
// A record is a reference (docker.io/library/busybox:latest) in the database. It points at a target, the manifest or
// index that a registry resolved it to. An image's id is the digest of its configuration; several records and targets
// may share one. A snapshot is an unpacked layer (committed) or a container's writable layer (active).
//
//	absent --Pull, Import--> fetching --> unpacking --> recorded --Remove--> garbage --collect--> absent
//
// A pull's lease keeps its blobs and layers until they are recorded. Open deletes the
// leases of a killed predecessor, so an image is either recorded and complete, or
// garbage. Compressed layers are garbage once they are unpacked, unless Config.KeepLayers.
//
// Everything lies below <Root>/image. One process holds it at a time (meta.db is
// locked); while none does, OpenToLook reads it and changes nothing:
//
//	meta.db      records, leases, labels, snapshot names (bbolt)
//	content/     manifests, configurations, layers under way
//	overlayfs/   metadata.db and snapshots/<n>/{fs,work}
//
// Locks. List and Get take none. All that may be held while a disk or a registry hangs end with the context of who
// waits. A pull takes the locks of its blobs and layers in the order of the image, so that no waiting is circular.
//
//	lock                         held while                                who waits, and how long
//	the database                 a transaction is written (fsync)          changes of records and snapshots
//	Store.changing               records change, and are read anew         those who record images; its context
//	snapshotter.making           a snapshot is made, or a name is changed  those who make one; its context
//	locks (by blob and layer)    it is fetched or unpacked at 64 KiB/s     pulls of the same; its context
//	Store.collecting             garbage is collected                      Remove; its context
//	places (zstd)                a layer is decoded at 64 KiB/s            pulls with zstd layers; its context
//	Store.closing                Close begins                              nobody waits: memory only
//	all fields named mu          memory is changed                         nobody waits: memory only
//	pulling.reporting            a step is reported to its own client      that pull
//
// Limits: vet.go and link.go bound what a registry answers, room.go what a layer unpacks
// to, unpack.go the memory of a decoder.
package image
