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
//	lock                         held while                        who waits, and how long
//	the library's                a plugin answers                  nobody: Plugins.asking is taken before
//	Plugins.asking               a plugin answers                  requests of all pods; their contexts
//	the library's for joins      a plugin is synchronized          requests of all pods; their contexts
//	Plugins.switching            NRI is switched on or off         a reload; no request takes it
//	door.introducing             a plugin registers                other plugins that join
//	door.mu, Plugins.mu, link.mu memory is changed                 nobody: nothing is asked under them
//
// A plugin is synchronized while no request is made, so it sees each pod and container once: in
// its list or in a request. door.mu guards what requests have noted and no list has yet.
package nri
