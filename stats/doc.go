// Package stats measures pods and containers: cpu, memory, swap, processes and
// pressure from the kernel's cgroup files, network counters by netlink, and
// the writable layers by the image store.
//
// It owns no container and no pod: the caller says what is to be measured, and
// where. What it keeps is the last sample of each cgroup's cpu (rate.go), from
// which a rate follows, and the last measurement of each writable layer
// (layer.go). Both are forgotten when they were not asked for in a while.
//
// The cgroup files are read directly, into one buffer, with as few system calls
// as there can be: a node measures all its containers every few seconds. On
// version 1 (cgroups(7)) a container is four files in three hierarchies, on
// version 2 up to ten in one; a controller that is not there leaves its part of
// the answer empty, and so does a file that cannot be read. On a hybrid machine
// pressure is read from the unified hierarchy, if the container has a cgroup there.
//
// # Locks
//
// rates.mu and layers.mu guard a map each and are never held while anything is
// read. Walking a writable layer may take long, on a dead disk without end: it is
// done in a goroutine of its own, one for each container and a few at once; a
// call waits no longer than layerWait for all of them together, or aloneWait for a
// single container or pod. Close ends the waiting and the walks.
package stats
