// Package stream serves exec, attach and port-forward over HTTP, as the
// kubelet passes them on from kubectl: over SPDY/3.1 and over WebSockets.
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
// long as the client's connection (conn.go). All that is done for a session is
// under its context and counted in its work, and has ended when the session
// has: a client that vanishes leaves no process, goroutine or descriptor. The
// context ends with the connection, with the idle time-out, and with the
// daemon; the end of it closes the connection, so that nobody waits for a
// client that does not read.
//
// # Protocols
//
//	               SPDY/3.1                     WebSocket
//	exec, attach   v4.channel.k8s.io            v5.channel.k8s.io, v4.channel.k8s.io
//	               (spdycommand.go)             (websocket.go)
//	port-forward   portforward.k8s.io           SPDY/3.1+portforward.k8s.io: the same, tunnelled
//	               (spdyforward.go)             v4.channel.k8s.io: a connection for each port (channelforward.go)
//
// The API server of a cluster translates what kubectl tunnels, and speaks SPDY
// to the node; the tunnel is for clients that come without it.
//
// # Who owns what
//
// The shim owns the processes and their streams; this package copies between
// them and the client. The daemon's end ends all sessions, and with them the
// execs; what is attached to goes on. A session holds some hundred KiB for its
// buffers, however slowly its client reads, and at most a MiB over SPDY.
//
// # Locks
//
// requests.mu guards the pending requests and the count of open ones;
// spdyConn.mu, commandStreams.mu and pairs.mu the streams that a client has
// opened. Nothing waits under them, but for the reply to a stream under
// commandStreams.mu, which only that session wants.
package stream
