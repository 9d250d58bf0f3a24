// Package nri lets plugins of the Node Resource Interface take part in the lives
// of pods and containers, by the adaptation of github.com/containerd/nri. It is
// behind two interfaces, sandbox.Plugins and container.Plugins.
//
// # States
//
//	New       Open, Reconfigure          Reconfigure
//	----> off ------------------------> on -----------> off
//
// While it is off no plugin is asked and nothing listens. Open comes when pods and
// containers are restored: it starts the plugins of the directory, synchronizes
// them, and listens for others. Reconfigure switches it on and off, or over to
// plugins from elsewhere; Close switches it off for good. Plugins are synchronized
// with the pods and containers that were made while it was off. Of one that is being
// made at the moment when it is switched on they may learn only when it ends.
//
// # Who owns what
//
// The library owns registration, the order of plugins, and how their answers
// become one. The door owns the connections and the plugins that were started here:
// all of them end with it. This package turns pods, containers and resources into
// NRI's messages, and answers into changes of a spec.
//
// # Locks
//
// The library holds one lock for the whole node while it asks a plugin, for as long
// as the plugin takes. Plugins.asking is held around that, so that who waits for it
// gives up with its context.
//
// A plugin that connects is synchronized while no request is made: it is sent each
// pod and container once, in its list or by a request. door.mu guards what requests
// were about that no list has yet, and is never held while anything is asked, nor is
// Plugins.mu. Plugins.switching is held while NRI is switched on or off; no request takes
// it.
package nri
