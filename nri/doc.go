// Package nri lets plugins of the Node Resource Interface take part in the lives of pods and
// containers. It runs the adaptation of github.com/containerd/nri behind sandbox.Plugins and
// container.Plugins.
//
// # States
//
//	New       Open, Reconfigure          Reconfigure
//	----> off ------------------------> on -----------> off
//
// While NRI is off, no plugin is asked and nothing listens. Open runs when pods and containers
// are restored. It starts the plugins of the directory, synchronizes them, and listens for
// others. Reconfigure switches NRI on and off, or over to other plugins, which are synchronized
// with what was made before, but perhaps not with what is just being made. Close is for good.
//
// # Who owns what
//
// The library owns registration, the order of plugins, and the merging of their answers. The
// door owns the connections and the plugins that we started, which end with it. This package
// turns pods, containers and resources into NRI's messages, and answers into changes of a spec.
//
// # Locks
//
// The library holds one lock for the whole node while a plugin answers. Plugins.asking is held
// around that, so that who waits gives up with its context. Plugins.switching is held while
// NRI is switched on or off; no request takes it.
//
// A plugin is synchronized while no request is made, so it sees each pod and container once: in
// its list or in a request. door.mu guards what requests have noted and no list has yet. Nothing
// is asked under door.mu or Plugins.mu.
package nri
