// Package namespace owns the network and user namespaces of pods: it creates
// them, keeps them alive without a process by pinning them to files, brings
// their loopback up, dials into them and removes them.
//
// A namespace is found by its pod's id alone: the path of its pin follows from
// the directory, the mark of this node and the id. The package keeps no state
// besides those files and has no lock; the methods of Dir may be called
// concurrently for different ids. Calls for one id are serialised by the
// sandbox's lock.
package namespace
