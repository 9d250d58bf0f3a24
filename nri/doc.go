// Package nri lets plugins of the Node Resource Interface take part in the lives
// of pods and containers, by the adaptation of github.com/containerd/nri. It is
// behind two interfaces, sandbox.Plugins and container.Plugins, which are nil
// where NRI is off.
//
// # States
//
//	New                       Open                      Close
//	----> (no plugin is asked) ---> (plugins are asked) -----> (no plugin is asked)
//
// Open comes when pods and containers are restored: it starts the plugins of the
// directory, synchronizes them, and listens for others.
//
// # Who owns what
//
// The library owns connections, the order of plugins, and how their answers
// become one. This package turns pods, containers and resources into NRI's
// messages, and answers into changes of a spec.
//
// # Locks
//
// The library holds one lock for the whole node while it asks a plugin, for as
// long as the plugin takes. Here that lock is released around every question
// (turn.go), so that a plugin that hangs over one pod holds up no other one. A
// plugin therefore gets the requests of several pods concurrently; those about
// one container come one after another, by the container's own lock.
//
// A plugin that connects is synchronized while no request begins: it is sent
// each pod and container once, in its list or by a request. A request that has
// begun is not waited for; Plugins.mu guards what such requests are about, and
// is never held while anything is asked.
package nri
