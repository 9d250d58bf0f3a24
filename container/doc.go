// Package container creates, keeps and destroys the application containers of
// pods.
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
//	 8 nri create  with NRI: its plugins adjust the spec (adjust.go)
//	 9 labels    of SELinux, for the sources of mounts that ask for it
//	10 shim      the pod's supervisor serves; it is started if none does
//	11 create    the container's init waits at the exec barrier
//	12 nri created  with NRI: its plugins are notified
//	13 recheck   the pod was not stopped at the same time, and the caller still waits
//
// StartContainer has the steps nri start, start and nri started,
// UpdateContainerResources nri update and nri updated; those of NRI are only there
// with it. StopContainer has the step kill, after the grace. The step nri stop comes
// after every end, asked for or not.
// RemoveContainer kills, and goes through: nri remove, delete, remove rootfs,
// remove record.
//
// Destroy (destroy.go) is the only undo; its callers are a failed create,
// RemoveContainer, the removal of the pod, and recovery after a crash (restore.go).
//
// # States
//
//	          create            start            exit, stop
//	(nothing) ------> Created ---------> Running -----------> Exited
//	                      \__________________________________/^
//	                        start failed, or the pod was stopped
//
// A state is never stored. It follows from facts: when the container was
// started, and when it ended, as its supervisor has reported. While a supervisor is
// gone and its successor has not reported yet, the state is Unknown.
//
// The supervisor owns the processes, their streams, their log and their exit. This package
// owns the record, the facts, the snapshot and its mount.
//
// # Locks
//
// Each container has a lock of its own, held by every operation that makes, starts,
// updates or destroys it; Create takes it before the container is visible. The facts have
// another one, held while they are written only, so that what a supervisor reports waits
// for no operation; nothing is written after their removal. Events are emitted under it,
// and before the callers that wait for the end are woken, so they are in order.
// Stop holds neither while it waits for a container to end, so that a later Stop with a
// shorter grace counts. Package object has the rest.
package container
