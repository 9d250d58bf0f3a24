// Package spdy is the server's side of SPDY/3.1 (draft-mbelshe-httpbis-spdy-00,
// with the changes of 3.1), as far as clients of exec, attach and port-forward
// use it: they open streams, the server opens none.
//
// Frames of control are parsed by the framer of github.com/moby/spdystream. Its
// connection is not used: it queues frames by number, up to 250 of 16 MiB each,
// shares five workers among all streams, and holds a compressor of 0.8 MiB for
// replies without headers. Here one goroutine reads the connection, hands each piece
// of data to the sink of its stream, and continues when the sink has taken it, so a
// connection costs its buffer and its decompressor, some 100 KiB, whatever the
// client sends: frames of data may have any length, control frames at most
// maxControl, headers at most maxHeaders.
//
// SPDY as its clients speak it has no flow control for each stream: a sink that
// waits holds up all streams of its connection. How long it may is up to the
// sink.
//
// # Locks
//
// Conn.writing is held while a frame is written.
package spdy
