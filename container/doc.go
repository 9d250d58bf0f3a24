// Package container makes application containers in the sandboxes of pods,
// keeps them and takes them back.
//
// # The life of a container
//
// CreateContainer goes through these steps, by these names, in this order
// (create.go; the list as data is Steps). With "container/" before them the names
// are those of the failpoints and metrics; alone they are the prefixes of errors
// and the rows of the timeline:
//
//	 1 check     the request; nothing has a side effect before it is complete
//	 2 reserve   the name; a pod has one container per name and attempt
//	 3 record    durable, before anything of the container exists
//	 4 rootfs    a snapshot on top of the image, mounted; images that are volumes too
//	 5 sources   of the mounts: directories of the node, made where they are missing
//	 6 volumes   that the image declares, filled with what it has in their places
//	 7 spec      the runtime-spec, from the CRI's config
//	 8 nri create   with NRI: its plugins adjust the spec (adjust.go)
//	 9 labels    of SELinux, for the sources of mounts that ask for it
//	10 shim      of the pod, started with its first container, ended with the pod
//	11 create    the container's init waits at the exec barrier
//	12 nri created  with NRI: its plugins are told
//	13 recheck   the pod was not stopped meanwhile, and the caller is still there
//
// StartContainer has the steps nri start, start and nri started,
// UpdateContainerResources nri update and nri updated; those of NRI are only there
// with it. StopContainer has the step kill, after the grace, and nri stop, which
// comes after every end.
// RemoveContainer kills, and goes through: nri remove, delete, remove rootfs,
// remove record.
//
// On any error the container is destroyed (destroy.go). As for sandboxes,
// destroy is the only undo; its callers are a failed create, RemoveContainer,
// the removal of the pod, and recovery after a crash (restore.go).
//
// # States
//
//	          create            start            exit, stop
//	(nothing) ------> Created ---------> Running -----------> Exited
//	                      \__________________________________/^
//	                        start failed, or the pod was stopped
//
// A state is never stored. It follows from facts: when the container was
// started, and when it ended, as its shim has told. While the shim is gone and
// nobody has looked yet, the state is Unknown.
//
// # Who owns what
//
// The shim owns the processes: it is their parent, holds their streams, writes
// their log and keeps their exit on disk. This package owns the record, the
// facts, the snapshot and its mount, and the connection to each pod's shim
// (shim/client), whose events it follows.
//
// # Locks
//
// Containers.mu guards the maps and is never held while anything runs or is
// written. Each container has a lock of its own, held by whoever makes, starts,
// updates or destroys it; Create takes it before anybody can see the container.
// The facts have another one, held while they are written only, so that what a
// shim tells waits for no operation; nothing is written after their removal.
// Stop holds neither while it waits for a container to end, so that a later
// Stop with a shorter grace counts. Readers take none: facts are replaced, not
// changed. Events are told under the facts' lock, and before those who wait for
// the end go on, so they are in order.
package container
