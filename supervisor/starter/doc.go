// Package starter has processes make what belongs into containers: a starter is a
// process of its own that does one thing for one container (a [Request]), with
// libcontainer or by a program with runc's command line, answers, and ends. What a
// container, a hook or a runtime does to it holds up that one operation.
//
// A starter waits ready, started ahead ([Starters]). It has its own end of a socket,
// /dev/null as its streams and the descriptors of its request, and no other. It is the sub-reaper of what it
// starts: the supervisor owns a process that it reports ([children.Children.Own])
// while the starter still lives, and inherits it when the starter ends. Ended early,
// a starter is ended with all that it has started.
//
// The supervisor runs [Starters.Run]; package engine, in the starter, runs [Serve].
//
// Locks: Starters.mu, for moments only.
package starter
