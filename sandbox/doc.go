// Package sandbox creates, keeps and destroys pod sandboxes.
//
// # The life of a sandbox
//
// RunPodSandbox goes through these steps in this order (run.go). Failpoints and metrics
// name them "pod/" and the name; errors and the timeline use the name alone:
//
//	 1 check       the request; nothing has a side effect before it is complete
//	 2 reserve     the name; a second request for it waits and gets the same id
//	 3 record      of the sandbox
//	 4 sync        it is on the disk before ADD can run; along with 5 to 9
//	 5 files       log directory, shm, resolv.conf, hostname, hosts; along with 6 to 8
//	 6 userns      if asked for: it must own the network namespace
//	 7 netns       pinned at a path that follows from the id
//	 8 loopback    up
//	 9 prepare     pause, along with 10 and 11, or after them if it has sysctls of interfaces: its init waits at the
//	               exec barrier
//	10 cni add     the attachment is journalled, on the disk, too; ADD runs through go-cni
//	11 addresses   of eth0, from the result
//	12 nri run     with NRI: its plugins are asked (store.go)
//	13 start       pause is started; the sandbox is Ready
//
// UpdatePodSandboxResources has, with NRI: nri update, nri updated. StopPodSandbox has:
//
//	stop containers, nri stop, end pause, cni del, remove netns, remove userns,
//	unmount files, record stopped
//
// None of the others begins if "stop containers" fails. Each of them runs even if another one failed, but "remove
// netns" only after a DEL that succeeded, and "record stopped" only when all have succeeded.
//
// RemovePodSandbox stops, and then goes through: remove containers, end pause to unmount files once more, nri remove,
// remove files, remove record. An error of an NRI plugin is logged, and does not keep a pod from stopping.
//
// destroy (destroy.go) is the only undo: it tries every part, joins the errors, and leaves the record until all parts
// are gone, so that it can be called again. A failed Run, Remove, and recovery after a crash (restore.go) call it;
// its first part, teardown, is also that of Stop. Package sweep removes what has no record.
//
// # States
//
//	            Run                    Stop, or pause died
//	(nothing) ------> building ------> Ready ------> NotReady ------> (nothing)
//	                     |  failed                      ^      Remove
//	                     +------------------------------+
//	                       only if it could not be destroyed at once
//
// A state is never stored. It follows from what was recorded: when pause was started, when its
// end was noticed (the kernel is asked at the start, and watched), when Stop was done. A sandbox that is building is not listed.
//
// A sandbox has two files: the durable Record, written once, and the volatile Facts, which a
// reboot removes along with what they describe.
//
// # Locks
//
//	lock             held while                                who waits, and how long
//	Object.lock      Run, Stop, Remove or recovery of the pod  calls for the same pod; their contexts
//	Store.logDirs    a log directory is made                   pods with the same directory; their contexts
//	object.Store.mu  memory is changed                         nobody
//	Lives.mu         a timeline is written                     removals, while the disk of root hangs
package sandbox
