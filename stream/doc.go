// Package stream serves exec, attach and port-forward over HTTP, as the kubelet passes them on
// from kubectl: over SPDY/3.1 and over WebSockets.
//
// # The life of a request
//
//	          CRI call            HTTP request           its client or process ends
//	(nothing) --------> Pending ---------------> Open -----------------------------> (nothing)
//	                       \ one minute, no client
//	                        '-------> (nothing)
//
// The CRI call checks the request and answers with a URL that holds a token (server.go): random, good for one use and
// one minute, and never logged. The HTTP request becomes a session (session.go). The session's context ends with the
// client's connection, the idle time-out, or the daemon, and closes the connection. All that a session does ends with
// it: a client that vanishes leaves no process, goroutine or descriptor.
//
// # Protocols
//
//	               SPDY/3.1                     WebSocket (websocket.go)
//	exec, attach   v4, v3, v2, channel.k8s.io   v5 to v1 of channel.k8s.io and of base64.channel.k8s.io, or none
//	port-forward   portforward.k8s.io           SPDY/3.1+portforward.k8s.io: the same, tunnelled
//	                                            v4.channel.k8s.io: a connection for each port
//
// Each has streams, or channels, of the client. Output goes to an io.WriteCloser. Input goes to a
// spdy.Sink: a terminal's sizes (command.go), or an inlet (session.go), which leads to a process or
// a pod. Before v4 a client of exec gets a failure as text, and nothing for success.
//
// # Who owns what
//
// The supervisor owns the processes and their streams; this package copies between them and the
// client. The end of the daemon ends all sessions and their execs, but no container.
//
// # What clients cost
//
// A session holds its buffers, some hundred KiB, whatever its client sends and however slowly it
// reads. At most maxForwards connections are forwarded at once. A pod that reads nothing holds up
// the other connections of its session for stallTime at most.
//
// There are at most maxStrangers connections without a token. One too many ends one of the user who
// has most (strangers.go). Each has seconds to send its request. All sessions together have half of
// the daemon's descriptors, 65,536 at most.
//
// # Locks
//
//	lock                              held while                    who waits, and how long
//	requests.mu, strangers.mu         memory is changed             nobody
//	forwarder.sending                 a piece goes to the client    connections of one session; stallTime
//	channels.writing, Conn.writing    a message goes to the client  streams of one session; its time-out
package stream
