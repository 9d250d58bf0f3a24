package stream

import (
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/moby/spdystream"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
)

// commandStreams are the SPDY streams of exec or attach, by their type.
type commandStreams struct {
	wanted   map[string]bool
	complete chan struct{}

	mu    sync.Mutex
	found map[string]*spdystream.Stream
}

func newCommandStreams(o remotecommand.Options) *commandStreams {
	return &commandStreams{
		wanted: map[string]bool{
			remotecommand.StreamTypeError: true, remotecommand.StreamTypeStdin: o.Stdin,
			remotecommand.StreamTypeStdout: o.Stdout, remotecommand.StreamTypeStderr: o.Stderr,
			remotecommand.StreamTypeResize: o.TTY,
		},
		complete: make(chan struct{}),
		found:    make(map[string]*spdystream.Stream),
	}
}

// accept is called for a stream of the client.
func (c *commandStreams) accept(stream *spdystream.Stream) error {
	kind := stream.Headers().Get(remotecommand.StreamType)
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.wanted[kind] || c.found[kind] != nil {
		return fmt.Errorf("stream %q was not asked for, or twice", kind)
	}
	if err := reply(stream); err != nil {
		return err
	}
	c.found[kind] = stream
	for kind, wanted := range c.wanted {
		if wanted && c.found[kind] == nil {
			return nil
		}
	}
	close(c.complete)
	return nil
}

// commandSPDY serves exec or attach over SPDY: a stream for each direction, one
// for the sizes of a terminal, and one for the status at the end.
func (s *session) commandSPDY(u *upgrade, o remotecommand.Options, run func(clientStreams) error) {
	conn, err := s.upgradeSPDY(u, remotecommand.StreamProtocolV4Name)
	if err != nil {
		return // the client has been told
	}
	streams := newCommandStreams(o)
	c, err := s.newSPDY(conn, streams.accept)
	if err != nil {
		s.report("serve SPDY", err)
		return
	}
	c.serve()
	defer c.close()
	if err := s.await(streams.complete); err != nil {
		s.report("exec or attach", err)
		return
	}
	status := streams.found[remotecommand.StreamTypeError]
	err = run(streams.client(s, o))
	_ = json.NewEncoder(status).Encode(statusOf(err)) // fails if the client is gone
	_ = status.Close()
}

// await waits for the client to open its streams.
func (s *session) await(complete <-chan struct{}) error {
	expired := time.NewTimer(s.server.options.Creation)
	defer expired.Stop()
	select {
	case <-complete:
		return nil
	case <-s.request.Context().Done():
		return s.request.Context().Err()
	case <-expired.C:
		return errors.New("the client did not open its streams in time (streaming.creation_timeout)")
	}
}

// client gives the streams their places. Those that are missing stay nil.
func (c *commandStreams) client(s *session, o remotecommand.Options) (streams clientStreams) {
	if o.Stdin {
		streams.stdin = c.found[remotecommand.StreamTypeStdin]
	}
	if o.Stdout {
		streams.stdout = c.found[remotecommand.StreamTypeStdout]
	}
	if o.Stderr {
		streams.stderr = c.found[remotecommand.StreamTypeStderr]
	}
	if o.TTY {
		streams.size = s.sizes(c.found[remotecommand.StreamTypeResize])
	}
	return streams
}
