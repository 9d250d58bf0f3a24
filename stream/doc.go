// Package stream serves exec, attach and port-forward over HTTP, as the
// kubelet passes them on from kubectl: SPDY/3.1, and WebSocket with the
// protocols v5.channel.k8s.io and v4.channel.k8s.io.
//
// # The life of a request
//
//	          CRI call            HTTP request           its client or process ends
//	(nothing) --------> Pending ---------------> Open -----------------------------> (nothing)
//	                       \ one minute, nobody came
//	                        '-------> (nothing)
//
// The CRI call checks the request and answers with a URL, whose token stands
// for the request (requests.go): random, good for one use and one minute, and
// never logged. The HTTP request becomes a session (session.go), that lasts as
// long as the client's connection. All that is done for a session is under its
// context, and has ended when the session has: a client that vanishes leaves
// no process, goroutine or descriptor.
//
// # Who owns what
//
// The shim owns the processes and their streams; this package copies between
// them and the client. The daemon's end ends all sessions, and with them the
// execs; what is attached to goes on.
//
// # Locks
//
// requests.mu guards the pending requests and the count of open ones. Nothing
// runs under it.
package stream
