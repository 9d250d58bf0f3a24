// Package stream serves exec, attach and port-forward over HTTP, as the
// kubelet passes them on from kubectl: over SPDY/3.1 and over WebSockets.
//
// # The life of a request
//
//	          CRI call            HTTP request           its client or process ends
//	(nothing) --------> Pending ---------------> Open -----------------------------> (nothing)
//	                       \ one minute, no client
//	                        '-------> (nothing)
//
// The CRI call checks the request and answers with a URL, whose token stands
// for the request (server.go): random, good for one use and one minute, and
// never logged. The HTTP request becomes a session (session.go), which lasts as
// long as the client's connection. All that is done for a session is under its
// context and has ended when the session has: a client that vanishes leaves no
// process, goroutine or descriptor. The context ends with the connection, with the
// idle time-out, and with the daemon; its end closes the connection, so that
// nothing waits for a client that does not read.
//
// # Protocols
//
//	               SPDY/3.1                     WebSocket (websocket.go)
//	exec, attach   v4, v3, v2, channel.k8s.io   v5 to v1 of channel.k8s.io and of base64.channel.k8s.io, or none
//	port-forward   portforward.k8s.io           SPDY/3.1+portforward.k8s.io: the same, tunnelled
//	                                            v4.channel.k8s.io: a connection for each port
//
// Each has streams, or channels, of the client. What is written to the client goes to
// an io.WriteCloser, and what the client sends to a spdy.Sink: that of a terminal's
// sizes (command.go), or an inlet (session.go), which leads to a process or a pod.
// Before v4 a client of exec gets a failure as text, and nothing for success. The API
// server of a cluster translates what kubectl tunnels, and speaks SPDY to the node;
// the tunnel is for clients that come without it.
//
// # Who owns what
//
// The supervisor owns the processes and their streams; this package copies between
// them and the client. The daemon's end ends all sessions, and with them the
// execs; a container that a session was attached to continues to run.
//
// # What clients cost
//
// A session holds its buffers, some hundred KiB, whatever its client sends and
// however slowly it reads: input is passed on in pieces as it arrives, and what a
// pod writes is read when the client has taken the piece before. At most maxForwards
// connections are forwarded at once. A pod that takes nothing while its client sends
// more holds up the other connections of the session for stallTime at most.
//
// A connection without a token is one of maxStrangers, of which the oldest makes
// room, and has seconds to send its request. All sessions together have half of the
// daemon's descriptors.
//
// # Locks
//
// requests.mu guards the pending requests and the number of sessions, strangers.mu
// the connections without a token; nothing waits under them. forwarder.sending is held
// while a piece goes from a pod to the client, channels.writing while a message does.
package stream
