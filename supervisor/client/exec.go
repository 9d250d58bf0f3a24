package client

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/minicri/minicri/internal/socket"
	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/pipe"
)

// ExecOptions describe a command in a container.
type ExecOptions struct {
	Container string
	Process   *specs.Process
	Stdin     bool   // the caller writes to Exec.Stdin; else the command's is at its end
	Apart     bool   // see api.ExecRequest
	SELinux   string // the label of the container's files; empty: none
}

// Exec is a command that runs. The caller reads all Outputs, calls Wait, and then Close, or End after an error.
type Exec struct {
	Stdin   io.WriteCloser           // Close ends the input, except of a terminal; nil without
	Outputs map[string]io.ReadCloser // by api.Stdout and api.Stderr; a terminal has only the first one
	Resize  func(ctx context.Context, width, height uint32) error

	files  []io.Closer
	kill   func() // has the supervisor end the command with all that it has started
	done   func() // has it leave background children
	over   func() // ends the connection
	ended  chan struct{}
	code   int32         // set before ended is closed
	err    error         // set before ended is closed: the supervisor is lost, or has given the command up
	closed chan struct{} // closed when the supervisor has done its part
}

// ExecResult is the result of a command that ran to its end.
type ExecResult struct {
	Stdout, Stderr []byte
	Code           int32 // 128 + signal if killed by one
	TimedOut       bool  // the command was ended with all that it had started
	Cut            bool  // a part of the outputs is missing
}

// ExecSync runs a command to its end or time-out (none if 0), and captures limit bytes of both outputs together, or
// less while all calls have captured much. It does not wait for background children that are silent. A cancelled
// ctx ends the command and all it started.
func (c *Client) ExecSync(
	ctx context.Context, o ExecOptions, timeout time.Duration, limit int, all *Captured,
) (*ExecResult, error) {
	bounded := ctx
	if timeout > 0 {
		var over func()
		late := fmt.Errorf("not done within %v: %w", timeout, context.DeadlineExceeded)
		bounded, over = context.WithTimeoutCause(ctx, timeout, late)
		defer over()
		o.Apart = true
	}
	e, err := c.Exec(bounded, o)
	if err != nil {
		return nil, err
	}
	output := &capture{all: all, limit: limit}
	code, err := e.Wait(bounded, output.read(e))
	if err == nil {
		e.Close()
		defer output.release()
		result := output.result()
		result.Code = code
		return &result, nil
	}
	end := func(limit time.Duration) {
		e.End(limit)
		output.release()
	}
	if bounded.Err() != nil && ctx.Err() == nil {
		end(execSlack)
		return &ExecResult{Code: 128 + int32(unix.SIGKILL), TimedOut: true}, nil
	}
	go end(EndLimit)
	return nil, err
}

// Exec starts a command. When ctx ends before, the command and all it started are ended.
func (c *Client) Exec(ctx context.Context, o ExecOptions) (*Exec, error) {
	if c.protocol < api.Protocol {
		return c.execByStreams(ctx, o)
	}
	conn, err := c.dial(ctx, api.ExecSocket)
	if err != nil {
		return nil, err
	}
	e := newExec()
	e.kill = func() { _ = conn.CloseWrite() }
	e.done = func() { _, _ = conn.Write([]byte{0}) }
	e.over = func() { _ = conn.Close() }
	lives, waits := context.AfterFunc(c.life, e.over), context.AfterFunc(ctx, e.over)
	answers, err := e.start(conn, o, filepath.Join(c.dir, api.StreamDir))
	if !waits() { // ctx has ended
		err = context.Cause(ctx)
	}
	if err != nil {
		lives()
		e.close()
		return nil, err
	}
	go func() { // ends with the connection
		defer lives()
		var answer api.ExecAnswer
		err := answers.Decode(&answer)
		e.finish(answer.ExitCode, lost(err))
		_, _ = conn.Read(make([]byte, 1)) // the supervisor sends nothing more
		close(e.closed)
	}()
	return e, nil
}

func newExec() *Exec {
	return &Exec{
		Outputs: make(map[string]io.ReadCloser), ended: make(chan struct{}), closed: make(chan struct{}),
		kill: func() {}, done: func() {}, over: func() {},
	}
}

// start hands the command and its ends of the pipes to the supervisor, and returns the decoder of later answers.
func (e *Exec) start(conn *net.UnixConn, o ExecOptions, dir string) (*json.Decoder, error) {
	var ends []*os.File
	defer func() { socket.CloseAll(ends...) }()
	if !o.Process.Terminal {
		var err error
		if ends, err = e.openPipes(o, dir); err != nil {
			return nil, fmt.Errorf("open the pipes of a command: %w", err)
		}
	}
	request := api.ExecRequest{Container: o.Container, Process: o.Process, Apart: o.Apart}
	if err := socket.SendMessage(conn, request, ends...); err != nil {
		if errdefs.IsInvalidArgument(err) {
			return nil, err
		}
		return nil, lost(err)
	}
	var answer api.ExecAnswer
	files, answers, err := socket.ReceiveMessage(conn, &answer)
	for _, file := range files {
		e.files = append(e.files, file)
	}
	switch {
	case err != nil:
		return nil, lost(err)
	case answer.Error != "":
		return nil, errgrpc.ToNative(status.Error(codes.Code(answer.Kind), answer.Error))
	case !o.Process.Terminal:
		return answers, nil
	case len(files) != 1:
		return nil, fmt.Errorf("the supervisor has sent %d terminals: %w", len(files), errdefs.ErrInternal)
	}
	return answers, e.takeTerminal(files[0])
}

// openPipes makes the pipes, and returns the command's ends of stdin, stdout and stderr.
func (e *Exec) openPipes(o ExecOptions, dir string) (ends []*os.File, err error) {
	in, stdin, err := pipe.Open(dir, o.SELinux)
	if err != nil {
		return nil, err
	}
	ends = append(ends, in)
	e.files = append(e.files, stdin)
	if o.Stdin {
		e.Stdin = stdin
	} else {
		_ = stdin.Close()
	}
	for _, name := range []string{api.Stdout, api.Stderr} {
		source, end, err := pipe.Open(dir, o.SELinux)
		if err != nil {
			return ends, err
		}
		ends = append(ends, end)
		e.files = append(e.files, source)
		if err := pipe.Awaitable(source); err != nil {
			return ends, err
		}
		e.Outputs[name] = pipe.NewOutput(source)
	}
	return ends, nil
}

// takeTerminal takes the master, in the mode in which Go can wait for it.
func (e *Exec) takeTerminal(sent *os.File) error {
	number, err := unix.FcntlInt(sent.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("take the terminal of a command: %w", err)
	}
	err = unix.SetNonblock(number, true)
	master := os.NewFile(uintptr(number), "terminal")
	e.files = append(e.files, master)
	if err = errors.Join(err, sent.Close()); err == nil {
		err = pipe.Awaitable(master)
	}
	if err != nil {
		return fmt.Errorf("take the terminal of a command: %w", err)
	}
	e.Stdin, e.Outputs[api.Stdout] = terminalInput{master}, pipe.NewOutput(master)
	e.Resize = func(_ context.Context, width, height uint32) error { return pipe.Resize(master, width, height) }
	return nil
}

// terminalInput has no end: that of the output is the end of the terminal.
type terminalInput struct{ io.Writer }

func (terminalInput) Close() error { return nil }

// lost returns the error of a connection to the supervisor that has ended.
func lost(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w: %w", ErrLost, err)
}

// finish notes how the command has ended.
func (e *Exec) finish(code int32, err error) {
	e.code, e.err = code, err
	close(e.ended)
	for _, file := range e.Outputs {
		if output, is := file.(*pipe.Output); is {
			pipe.Finish(output.File)
		}
	}
}

// Wait returns the exit code when the command has ended and the caller has read its outputs, which closes delivered.
func (e *Exec) Wait(ctx context.Context, delivered <-chan struct{}) (int32, error) {
	select {
	case <-e.ended:
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	}
	if e.err != nil {
		return 0, e.err
	}
	select {
	case <-delivered:
		return e.code, nil
	case <-ctx.Done(): // a background child may write without an end
		return 0, context.Cause(ctx)
	}
}

// Close is for a command that has ended. Background children continue to run.
func (e *Exec) Close() {
	e.done()
	e.close()
}

// End ends a command with all that it has started, also background children of a command that has ended. It waits up to
// a limit, because the supervisor may be busy. Only then it closes the outputs: without a reader the command could end
// before, and its children would be left.
func (e *Exec) End(limit time.Duration) {
	e.kill()
	select {
	case <-e.closed:
	case <-time.After(limit):
	}
	e.close()
}

func (e *Exec) close() {
	e.over()
	for _, file := range e.files {
		_ = file.Close()
	}
}

// execByStreams is Exec for a supervisor of protocol 2: it has a call for the start and one for the end, and each stream
// of the command has a connection.
func (c *Client) execByStreams(ctx context.Context, o ExecOptions) (*Exec, error) {
	encoded, err := json.Marshal(o.Process)
	if err != nil {
		return nil, fmt.Errorf("exec in container %s: %w", o.Container, err)
	}
	e, id := newExec(), rand.Text()
	e.kill = func() {
		end, cancel := context.WithTimeout(context.Background(), EndLimit)
		defer cancel()
		request := &api.KillRequest{Id: o.Container, ExecId: id, Signal: uint32(unix.SIGKILL), All: true}
		_, _ = c.rpc.Kill(end, request) // fails if the command has ended, or the supervisor, whose successor ends it
	}
	e.Resize = func(ctx context.Context, width, height uint32) error {
		_, err := c.rpc.Resize(ctx, &api.ResizeRequest{Id: o.Container, ExecId: id, Width: width, Height: height})
		return native(err)
	}
	request := &api.ExecStartRequest{Id: o.Container, ExecId: id, Process: encoded, Stdin: o.Stdin}
	if _, err = c.rpc.ExecStart(ctx, request); err == nil {
		err = e.openStreams(ctx, c, o, id)
	}
	if err == nil {
		var call api.ShimClient
		if call, e.over, err = c.open(ctx); err == nil {
			go func() {
				defer close(e.closed)
				answer, err := call.ExecWait(context.Background(), &api.ExecWaitRequest{Id: o.Container, ExecId: id})
				e.finish(answer.GetCode(), native(err))
			}()
			return e, nil
		}
	}
	e.over = func() {}
	e.close()
	if ctx.Err() != nil {
		go e.kill() // it may have been started
		return nil, context.Cause(ctx)
	}
	return nil, native(err)
}

func (e *Exec) openStreams(ctx context.Context, c *Client, o ExecOptions, id string) error {
	names := []string{api.Stdout}
	if !o.Process.Terminal {
		names = append(names, api.Stderr)
	}
	for _, name := range names {
		conn, err := c.stream(ctx, api.StreamRequest{Container: o.Container, Exec: id, Stream: name})
		if err != nil {
			return err
		}
		e.files, e.Outputs[name] = append(e.files, conn), conn
	}
	if !o.Stdin {
		return nil
	}
	conn, err := c.stream(ctx, api.StreamRequest{Container: o.Container, Exec: id, Stream: api.Stdin})
	if err != nil {
		return err
	}
	e.files, e.Stdin = append(e.files, conn), halfCloser{conn}
	return nil
}

// halfCloser closes only the sending half.
type halfCloser struct{ *net.UnixConn }

func (c halfCloser) Close() error { return c.CloseWrite() }

// Attach opens api.Stdin, api.Stdout or api.Stderr of a container. The connection carries the stream's bytes; CloseWrite
// on stdin is its end.
func (c *Client) Attach(ctx context.Context, id, stream string) (*net.UnixConn, error) {
	return c.stream(ctx, api.StreamRequest{Container: id, Stream: stream})
}

func (c *Client) stream(ctx context.Context, request api.StreamRequest) (*net.UnixConn, error) {
	conn, err := c.dial(ctx, api.StreamSocket)
	if err != nil {
		return nil, err
	}
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	defer context.AfterFunc(c.life, func() { _ = conn.Close() })() // a copy of its socket keeps the connection
	if err := ask(conn, request); err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("open %s of container %s: %w", request.Stream, request.Container, err)
	}
	return conn, nil
}

// ask requests a stream and reads the answer, byte by byte: what follows it is data.
func ask(conn *net.UnixConn, request api.StreamRequest) error {
	line, err := json.Marshal(request)
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
