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
// Locks: the database orders its writers. snapshotter.making is held while a snapshot is made and while directories
// are set aside for deletion. Store.changing is held while records change and the list in memory is read anew; List
// and Get take no lock. locks order pulls that share a blob or a layer; a pull takes both in the order of the image,
// so that no waiting is circular.
//
// Limits: vet.go and link.go bound what a registry answers, room.go what a layer unpacks
// to, unpack.go the memory of a decoder.
package image
