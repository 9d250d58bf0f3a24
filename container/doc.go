// Package container creates, keeps and destroys the application containers of pods.
//
// # The life of a container
//
// CreateContainer goes through these steps in this order (create.go). Failpoints and
// metrics name them "container/" and the name; errors and the timeline use the name alone:
//
//	 1 check     the request; nothing has a side effect before it is complete
//	 2 reserve   the name; a pod has one container per name and attempt
//	 3 record    durable, before anything of the container exists
//	 4 rootfs    a snapshot on top of the image, mounted; images that are volumes too
//	 5 sources   of the mounts: missing directories of the node are made, and stay
//	 6 spec      the runtime-spec, from the CRI's config, and what its mounts need
//	 7 volumes   that the image declares, filled with what it has in their places
//	 8 nri create  with NRI: its plugins adjust the spec (plugins.go)
//	 9 labels    of SELinux, for the sources of mounts that ask for it
//	10 supervisor  the pod's supervisor serves; it is started if none does; the log has a directory
//	11 create    the container's init waits at the exec barrier; the daemon opens its pidfd and its fifos, too
//	12 nri created  with NRI: its plugins are notified
//	13 recheck   the pod was not stopped meanwhile, what it joins lives, and the caller still waits
//
// StartContainer has the steps nri start, start and nri started; UpdateContainerResources nri update and nri updated.
// StopContainer has the step kill, after the grace; nri stop comes after every end, asked for or not. RemoveContainer
// kills, and goes through: nri remove, delete, remove rootfs, remove record. The nri steps exist only with NRI.
//
// destroy (destroy.go) is the only undo. A failed create, RemoveContainer, the removal of the
// pod, and recovery after a crash (restore.go) call it.
//
// # States
//
//	          create            start            exit, stop
//	(nothing) ------> Created ---------> Running -----------> Exited
//	                      \__________________________________/^
//	                        start failed, or the pod was stopped
//
// A state is never stored. It follows from two facts: when the container started, and when it
// ended, as its supervisor reported or the daemon found. From a supervisor's death until its successor's report,
// the state is Unknown.
//
// The supervisor owns the processes, their streams, their log and their exit. This package
// owns the record, the facts, the snapshot and its mount.
//
// # Locks
//
//	lock                        held while                             who waits, and how long
//	Object.lock                 a change of the container              calls for the container; their contexts
//	Container.factsLock         the facts are written                  reports about the container; its disk
//	Container.stopLock          plugins are notified of the end        start and stop of it; their contexts
//	Store.users                 users of an image are read             creations; their contexts
//	Store.logDirs, hostPaths    a directory is made, a path is opened  creations with the same one; their contexts
//	object.Store.mu             memory is changed                      nobody
//
// Every operation that makes, starts, updates or destroys a container holds the container's lock; Create takes it
// before the container is visible. factsLock is held only while the facts are written, so a supervisor's report
// waits for no operation; nothing is written after the facts are removed. All events but that of the removal are emitted
// under it, before those who wait for the end wake up, so they are in order. Stop holds neither lock while it waits
// for the end, so a later Stop with a shorter grace counts. Package object has the rest.
package container
