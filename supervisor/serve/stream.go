package serve

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/stdio"
)

func (s *Supervisor) serveStreams(listener net.Listener) {
	for {
		conn, err := listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // no descriptors left, for example
			time.Sleep(10 * time.Millisecond)
			continue
		}
		go s.serveStream(conn.(*net.UnixConn))
	}
}

func (s *Supervisor) serveStream(conn *net.UnixConn) {
	defer conn.Close()
	move, err := s.openStream(conn)
	var answer api.StreamResponse
	if err != nil {
		answer.Error = err.Error()
	}
	_ = json.NewEncoder(conn).Encode(answer) // a client that has gone is noticed by move
	if err == nil {
		move()
	}
}

// openStream reads the request. A client sends no data before the answer, so one read holds it alone.
func (s *Supervisor) openStream(conn *net.UnixConn) (move func(), err error) {
	_ = conn.SetDeadline(time.Now().Add(requestLimit))
	defer conn.SetDeadline(time.Time{})
	buffer := make([]byte, 4096)
	n, err := conn.Read(buffer)
	if err != nil {
		return nil, err
	}
	var request api.StreamRequest
	if err := json.Unmarshal(buffer[:n], &request); err != nil {
		return nil, fmt.Errorf("decode the request for a stream: %w", err)
	}
	c, err := s.find(request.Container)
	if err != nil {
		return nil, err
	}
	if request.Exec == "" {
		return c.attach(request.Stream, conn)
	}
	e, err := c.findExec(request.Exec)
	if err != nil {
		return nil, err
	}
	return e.attach(request.Stream, conn)
}

// attach connects a stream of an exec. An output is taken, so that ExecWait waits for it, and moved to the
// client. A client that goes away closes the pipe, as a shell's reader would.
func (e *exec) attach(stream string, conn *net.UnixConn) (move func(), err error) {
	if stream == api.Stdin {
		return feed(e.pipes.Stdin(), conn, e.pipes.CloseStdin)
	}
	var p *stdio.Pump
	p, err = e.pipes.Take(stream, func(chunk []byte) {
		if _, err := conn.Write(chunk); err != nil {
			_ = p.Close()
		}
	})
	if err != nil {
		return nil, err
	}
	return p.Run, nil
}

func (c *container) attach(stream string, conn *net.UnixConn) (move func(), err error) {
	streams := c.streams()
	if streams == nil {
		return nil, fmt.Errorf("attach to container %s: it has ended: %w", c.record.ID, errdefs.ErrNotFound)
	}
	if stream == api.Stdin {
		over := func() {}
		if c.stdinOnce {
			over = streams.CloseStdin
		}
		return feed(streams.Stdin(), conn, over)
	}
	fan := streams.Output(stream)
	if fan == nil {
		return nil, fmt.Errorf("attach to container %s: stream %s: %w", c.record.ID, stream, errdefs.ErrNotFound)
	}
	output := fan.Attach(true)
	return func() {
		go func() {
			// The client sends nothing: the end of this read is the client's.
			_, _ = io.Copy(io.Discard, conn)
			fan.Detach(output)
		}()
		for chunk := range output {
			if _, err := conn.Write(chunk); err != nil {
				fan.Detach(output) // which ends it
			}
		}
	}, nil
}

// feed returns what moves a client's input until either side ends. One that has left is given up while the process
// takes nothing, perhaps forever. Clients of one container set each other's deadline, and only look more often.
func feed(stdin *os.File, conn *net.UnixConn, over func()) (move func(), err error) {
	if stdin == nil {
		return nil, fmt.Errorf("attach to stdin: %w", errdefs.ErrNotFound)
	}
	return func() {
		defer over()
		for chunk, n := make([]byte, 32<<10), 0; err == nil; {
			n, err = conn.Read(chunk)
			for rest := chunk[:n]; len(rest) > 0; {
				_ = stdin.SetWriteDeadline(time.Now().Add(time.Second))
				taken, failed := stdin.Write(rest)
				if failed != nil && (!errors.Is(failed, os.ErrDeadlineExceeded) || stdio.Polled(conn, 0)) {
					return
				}
				rest = rest[taken:]
			}
		}
	}, nil
}
