package stream

import (
	"encoding/json"
	"io"

	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	"k8s.io/streaming/pkg/httpstream/wsstream"
)

// commandWebSocket serves exec or attach over a WebSocket, whose messages begin
// with the number of a channel. In v5 a client can close its stdin, in v4 it
// cannot.
func (s *session) commandWebSocket(u *upgrade, o remotecommand.Options, run func(clientStreams) error) {
	conn := wsstream.NewConn(map[string]wsstream.ChannelProtocolConfig{
		remotecommand.StreamProtocolV5Name:              {Binary: true, Channels: channels(o)},
		remotecommand.StreamProtocolV4Name:              {Binary: true, Channels: channels(o)},
		"v4." + wsstream.Base64ChannelWebSocketProtocol: {Channels: channels(o)},
	})
	_, streams, err := conn.Open(u, s.request)
	if err != nil {
		return // the client has been told
	}
	defer conn.Close()
	status := streams[remotecommand.StreamErr]
	if _, err := status.Write(nil); err != nil { // says that the connection is there
		return
	}
	err = run(s.channelStreams(o, streams))
	_ = json.NewEncoder(status).Encode(statusOf(err)) // fails if the client is gone
}

func channels(o remotecommand.Options) []wsstream.ChannelType {
	list := []wsstream.ChannelType{
		wsstream.IgnoreChannel, wsstream.IgnoreChannel, wsstream.IgnoreChannel, wsstream.WriteChannel, wsstream.ReadChannel,
	}
	if o.Stdin {
		list[remotecommand.StreamStdIn] = wsstream.ReadChannel
	}
	if o.Stdout {
		list[remotecommand.StreamStdOut] = wsstream.WriteChannel
	}
	if o.Stderr {
		list[remotecommand.StreamStdErr] = wsstream.WriteChannel
	}
	return list
}

// channelStreams are those channels that were asked for; the others exist, too.
// Sizes are always read: a client may send them without a terminal.
func (s *session) channelStreams(o remotecommand.Options, channels []io.ReadWriteCloser) (streams clientStreams) {
	if o.Stdin {
		streams.stdin = channels[remotecommand.StreamStdIn]
	}
	if o.Stdout {
		streams.stdout = channels[remotecommand.StreamStdOut]
	}
	if o.Stderr {
		streams.stderr = channels[remotecommand.StreamStdErr]
	}
	streams.size = s.sizes(channels[remotecommand.StreamResize])
	return streams
}

// sizes are those of the client's terminal, until the connection ends.
func (s *session) sizes(from io.Reader) <-chan remotecommand.TerminalSize {
	sizes := make(chan remotecommand.TerminalSize)
	s.work.Go(func() {
		defer close(sizes)
		decoder := json.NewDecoder(from)
		for {
			var size remotecommand.TerminalSize
			if decoder.Decode(&size) != nil {
				_, _ = io.Copy(io.Discard, from) // what else comes over the connection goes on
				return
			}
			select {
			case sizes <- size:
			case <-s.request.Context().Done():
				return
			}
		}
	})
	return sizes
}
