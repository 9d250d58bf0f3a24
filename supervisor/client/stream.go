package client

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"path/filepath"

	"github.com/containerd/errdefs"
	"github.com/minicri/minicri/supervisor/api"
)

// Stream opens api.Stdin, api.Stdout or api.Stderr of an exec, or with an empty
// exec of the container itself: attach. What comes from the connection, or goes
// into it, is the stream's bytes; CloseWrite on stdin is its end.
func (c *Client) Stream(ctx context.Context, id, exec, stream string) (*net.UnixConn, error) {
	conn, err := dialSocket(ctx, filepath.Join(c.dir, api.StreamSocket))
	if err != nil {
		return nil, err
	}
	defer c.peer.attend(ctx)()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	if err := request(conn, api.StreamRequest{Container: id, Exec: exec, Stream: stream}); err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("open %s of container %s exec %q: %w", stream, id, exec, err)
	}
	return conn, nil
}

// request asks for a stream and reads the answer, byte by byte: what follows it
// is data.
func request(conn *net.UnixConn, what api.StreamRequest) error {
	line, err := json.Marshal(what)
	if err != nil {
		return err
	}
	if _, err := conn.Write(append(line, '\n')); err != nil {
		return fmt.Errorf("%w: %w", errdefs.ErrUnavailable, err)
	}
	var answer []byte
	for b := make([]byte, 1); b[0] != '\n'; answer = append(answer, b[0]) {
		if _, err := conn.Read(b); err != nil {
			return fmt.Errorf("%w: %w", errdefs.ErrUnavailable, err)
		}
	}
	var response api.StreamResponse
	if err := json.Unmarshal(answer, &response); err != nil {
		return err
	}
	if response.Error != "" {
		return fmt.Errorf("%w: %s", errdefs.ErrNotFound, response.Error)
	}
	return nil
}
