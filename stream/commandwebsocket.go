package stream

import (
	"io"

	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
)

// remoteCommandProtocols are the subprotocols of exec and attach over a
// WebSocket: those of upstream's server, v5, in which a client can close its
// stdin, and what SPDY's clients call the same versions. Only v4 and v5 have a
// status in JSON.
func remoteCommandProtocols() map[string]channelProtocol {
	const v4, base64 = "v4.", "base64."
	return map[string]channelProtocol{
		"":                                 {},
		remotecommand.StreamProtocolV1Name: {},
		base64 + remotecommand.StreamProtocolV1Name:         {base64: true},
		remotecommand.StreamProtocolV2Name:                  {},
		"v2." + base64 + remotecommand.StreamProtocolV1Name: {base64: true},
		remotecommand.StreamProtocolV3Name:                  {},
		"v3." + base64 + remotecommand.StreamProtocolV1Name: {base64: true},
		remotecommand.StreamProtocolV4Name:                  {status: true},
		v4 + base64 + remotecommand.StreamProtocolV1Name:    {status: true, base64: true},
		remotecommand.StreamProtocolV5Name:                  {status: true, halfClose: true},
		"v5." + base64 + remotecommand.StreamProtocolV1Name: {status: true, base64: true, halfClose: true},
	}
}

// commandWebSocket serves exec or attach over a WebSocket: a channel for each
// direction, one for the status, one for the sizes of a terminal. It is a
// transport.
type commandWebSocket struct {
	session  *session
	options  remotecommand.Options
	channels *channels
}

func (t *commandWebSocket) open(u *upgrade) (*clientStreams, error) {
	sinks := make([]sink, remotecommand.StreamResize+1)
	streams := &clientStreams{}
	if t.options.Stdin {
		input := t.session.newInput()
		sinks[remotecommand.StreamStdIn], streams.stdin = input, input.reader
	}
	// Always read: a client may send sizes without a terminal.
	input := t.session.newInput()
	sinks[remotecommand.StreamResize], streams.size = input, t.session.sizes(input.reader)
	var err error
	if t.channels, err = t.session.openChannels(u, remoteCommandProtocols(), sinks); err != nil {
		return nil, errRefused // the client has its answer
	}
	if t.options.Stdout {
		streams.stdout = t.channels.writer(remotecommand.StreamStdOut)
	}
	if t.options.Stderr {
		streams.stderr = t.channels.writer(remotecommand.StreamStdErr)
	}
	_, err = t.first().Write(nil)
	return streams, err
}

// first is the lowest channel that the client reads. An empty message on it says
// that the session has begun.
func (t *commandWebSocket) first() io.Writer {
	switch {
	case t.options.Stdout:
		return t.channels.writer(remotecommand.StreamStdOut)
	case t.options.Stderr:
		return t.channels.writer(remotecommand.StreamStdErr)
	}
	return t.channels.writer(remotecommand.StreamErr)
}

func (t *commandWebSocket) finish(err error) {
	if text := encodeStatus(err, t.channels.protocol.status); len(text) > 0 {
		_, _ = t.channels.writer(remotecommand.StreamErr).Write(text) // fails if the client has left
	}
}

func (t *commandWebSocket) close() {
	if t.channels != nil {
		t.channels.close()
	}
}
