// Package image owns the node's images and the snapshots made from them:
// pulling, verifying, unpacking, naming, mounting, measuring and collecting.
//
// It runs containerd's content store, metadata database, overlay snapshotter,
// resolver and unpacker as libraries in this process and is the only package
// that knows them; callers see plain types.
//
// # Terms
//
//   - reference: a normalised name with a tag or a digest,
//     docker.io/library/busybox:latest (see ParseReference).
//   - record: a reference kept in the database, pointing at a target.
//   - target: the digest of the manifest or index that a registry resolved a
//     reference to.
//   - id: the digest of the image's configuration. Several records, and several
//     targets, may share one id; an image is the same under each of them.
//   - snapshot: one unpacked layer (committed), or a container's writable layer
//     on top of them (active).
//
// # The life of an image
//
//	absent --Pull, Import--> fetching --> unpacking --> recorded --Remove--> garbage --collect--> absent
//
// Everything before "recorded" is kept by the pull's lease. Leases do not
// outlive the process: Open deletes those that a killed predecessor left, so an
// image is either recorded, and then complete, or garbage. Compressed layers are
// garbage as soon as they are unpacked: only manifests, configurations and
// unpacked layers are kept.
//
// # On disk
//
// Everything lies below <Root>/image. One process holds it at a time (meta.db is
// locked); while none does, OpenToLook reads it and changes nothing:
//
//	meta.db      records, leases, labels, snapshot names (bbolt)
//	content/     manifests, configurations, layers under way
//	overlayfs/   metadata.db and snapshots/<n>/{fs,work}
//
// # Locks
//
// The database orders its own writers. snapshotter.making is held while one
// snapshot is made, which the database would order anyway, and while directories
// to be deleted are set aside. Store.changing is held while records change and the list
// in memory is read anew; List and Get take no lock. locks order pulls that share a blob
// or a layer; a pull takes blobs and layers in the order of the image, so that
// waiting is never circular. A key whose holder downloads too slowly is passed:
// then both do the work, and the stores take the first outcome (see pullLocks).
//
// # Limits
//
// What comes from outside is bounded before it is used: what a registry answers in
// vet.go and link.go, what a layer unpacks to in room.go, what a decoder holds in
// decompress.go.
package image
