package stream

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"k8s.io/cri-streaming/pkg/streaming/remotecommand"

	"github.com/minicri/minicri/stream/spdy"
)

// commandSPDY serves exec or attach over SPDY: a stream for each direction, one
// for the sizes of a terminal, and one for the status at the end. It is a
// transport.
type commandSPDY struct {
	session  *session
	options  remotecommand.Options
	conn     *spdy.Conn
	protocol string
	streams  clientStreams
	status   *spdy.Stream
	complete chan struct{} // closed when the client has opened all of wanted

	mu     sync.Mutex
	wanted map[string]bool // types of streams that are still to come
}

func (t *commandSPDY) open(u *upgrade) (*clientStreams, error) {
	conn, protocol, err := t.session.upgradeSPDY(u, remotecommand.SupportedStreamingProtocols...)
	if err != nil {
		return nil, errRefused // the client has its answer
	}
	t.protocol = protocol
	t.complete = make(chan struct{})
	// Before v3 there are no sizes.
	resize := t.options.TTY && (protocol == remotecommand.StreamProtocolV4Name || protocol == remotecommand.StreamProtocolV3Name)
	t.wanted = map[string]bool{remotecommand.StreamTypeError: true}
	for kind, wanted := range map[string]bool{
		remotecommand.StreamTypeStdin: t.options.Stdin, remotecommand.StreamTypeStdout: t.options.Stdout,
		remotecommand.StreamTypeStderr: t.options.Stderr, remotecommand.StreamTypeResize: resize,
	} {
		if wanted {
			t.wanted[kind] = true
		}
	}
	t.conn = spdy.NewConn(conn, t.accept)
	t.session.serveSPDY(t.conn)
	return &t.streams, t.await()
}

// accept is called for a stream of the client.
func (t *commandSPDY) accept(stream *spdy.Stream) (spdy.Sink, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	kind := stream.Header.Get(remotecommand.StreamType)
	if !t.wanted[kind] {
		return nil, fmt.Errorf("stream %q was not asked for, or twice", kind)
	}
	if err := stream.Reply(); err != nil {
		return nil, err
	}
	delete(t.wanted, kind)
	if len(t.wanted) == 0 {
		defer close(t.complete)
	}
	switch kind {
	case remotecommand.StreamTypeStdin:
		input := t.session.newInput()
		t.streams.stdin = input.reader
		return input, nil
	case remotecommand.StreamTypeResize:
		input := t.session.newInput()
		t.streams.size = t.session.sizes(input.reader)
		return input, nil
	case remotecommand.StreamTypeStdout:
		t.streams.stdout = stream
	case remotecommand.StreamTypeStderr:
		t.streams.stderr = stream
	case remotecommand.StreamTypeError:
		t.status = stream
	}
	return nil, nil // the client only reads it
}

// await waits for the client to open its streams.
func (t *commandSPDY) await() error {
	expired := time.NewTimer(t.session.server.options.Creation)
	defer expired.Stop()
	select {
	case <-t.complete:
		return nil
	case <-t.session.request.Context().Done():
		return t.session.request.Context().Err()
	case <-expired.C:
		return errors.New("the client did not open its streams in time (streaming.creation_timeout)")
	}
}

func (t *commandSPDY) finish(err error) {
	_, _ = t.status.Write(encodeStatus(err, t.protocol == remotecommand.StreamProtocolV4Name)) // fails if the client has left
	_ = t.status.Close()
}

func (t *commandSPDY) close() {
	if t.conn != nil {
		_ = t.conn.Close()
	}
}
