// Package spdy is the server's side of SPDY/3.1 (draft-mbelshe-httpbis-spdy-00, with the changes
// of 3.1), as far as clients of exec, attach and port-forward use it: only they open streams.
//
// The framer of github.com/moby/spdystream parses control frames. Its connection is not used: it queues up to 250
// frames of 16 MiB each, shares five workers among all streams, and holds a compressor of 0.8 MiB. Here one goroutine
// reads the connection and hands each piece of data to the sink of its stream before it continues. So a connection
// costs its buffer and decompressor, some 100 KiB, whatever the client sends: data frames may have any length,
// control frames at most maxControl, headers at most maxHeaders.
//
// Clients have no flow control for single streams: a sink that waits holds up all streams of its
// connection, for as long as the sink decides.
//
// Conn.writing is held while a frame is written.
package spdy
