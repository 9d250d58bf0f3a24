package runner

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/version"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/redact"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/internal/trace"
)

// Request says what is run.
type Request struct {
	Verb string
	// ID is the sandbox that it is for, "" for the verbs that are for none.
	ID, Network string
	// Plugins is how many the chain has.
	Plugins int
	// Limit is how long the run may take.
	Limit time.Duration
}

// Run is one run of a verb over a chain of plugins, and the Exec of libcni for it.
type Run struct {
	Request
	version.PluginDecoder
	// Group is the cgroup of the run.
	Group cgroup.Group
	// Deadline is when the limit of a run is over that an earlier daemon left.
	Deadline time.Time
	// Sought is how many plugins FindInPath was called for.
	Sought int

	// alive ends with Kill, and with it the plugin that runs.
	alive context.Context
	kill  context.CancelFunc

	mu      sync.Mutex
	reports []*Report
	// stderr is that of the last plugin.
	stderr *tail
	// searched are the directories that FindInPath has looked into last.
	searched []string
}

// FindInPath returns the program of a plugin; for one that is missing its name, so that
// the chain goes on to ExecPlugin, which says so.
func (run *Run) FindInPath(plugin string, directories []string) (string, error) {
	run.searched = directories
	run.Sought++
	if path, err := invoke.FindInPath(plugin, directories); err == nil {
		return path, nil
	}
	return filepath.Base(plugin), nil
}

// ExecPlugin runs a plugin and returns what it printed. A DEL that fails is an error
// of the last plugin of the chain only: libcni ends the chain at one, and forgets what
// ADD made at none.
func (run *Run) ExecPlugin(ctx context.Context, path string, stdin []byte, environment []string) ([]byte, error) {
	report := run.begin(filepath.Base(path))
	answer, err := run.execute(path, stdin, append(environment, trace.Environment(ctx)...))
	run.end(report, answer, err)
	switch {
	case run.Verb == "DEL" && len(run.Reports()) < run.Plugins:
		return nil, nil
	case run.Verb == "DEL":
		return nil, run.Verdict()
	case report.Failed():
		return nil, errors.New(report.Text())
	}
	return answer, nil
}

func (run *Run) begin(plugin string) *Report {
	report := &Report{Plugin: step.Plugin{Name: plugin, Verb: run.Verb, Killed: true}, Start: time.Now()}
	run.mu.Lock()
	defer run.mu.Unlock()
	run.reports, run.stderr = append(run.reports, report), &tail{}
	return report
}

// execute runs the program to its end and returns what it printed to stdout. A child
// that holds the plugin's input or output is waited for no longer than leftDelay.
func (run *Run) execute(path string, stdin []byte, environment []string) ([]byte, error) {
	if !filepath.IsAbs(path) {
		return nil, fmt.Errorf("failed to find the plugin %s in %s: install it or set cni_bin_dir", path, strings.Join(run.searched, ":"))
	}
	from, to, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("start the plugin: %w", err)
	}
	defer from.Close()
	var command *exec.Cmd
	for began := time.Now(); ; time.Sleep(busyPause) {
		command = exec.CommandContext(run.alive, path)
		command.Env, command.Stdin, command.Stdout, command.Stderr = environment, bytes.NewReader(stdin), to, run.stderr
		command.WaitDelay, command.SysProcAttr = leftDelay, &syscall.SysProcAttr{Setsid: true}
		// An installer may still be writing the program. Half of the limit leaves time to say so.
		if err = run.Group.Start(command); !errors.Is(err, unix.ETXTBSY) || time.Since(began) > run.Limit/2 {
			break
		}
	}
	_ = to.Close()
	if err != nil {
		return nil, fmt.Errorf("start the plugin: %w", err)
	}
	var answer bytes.Buffer
	read := make(chan struct{})
	go func() { // ends with the pipe, or at the deadline
		defer close(read)
		if n, _ := io.Copy(&answer, io.LimitReader(from, mostAnswer+1)); n > mostAnswer {
			_ = from.Close() // the plugin ends when it prints more
		}
	}()
	err = command.Wait()
	_ = from.SetReadDeadline(time.Now().Add(leftDelay))
	<-read
	answer.Write(rest(from))
	if answer.Len() > mostAnswer {
		return nil, fmt.Errorf("the answer has more than %d MiB, which no CNI result has", mostAnswer>>20)
	}
	if errors.Is(err, exec.ErrWaitDelay) {
		err = nil
	}
	return answer.Bytes(), err
}

// rest reads what a plugin that has ended still has in its pipe: on a busy machine a
// deadline may be over before anything was read.
func rest(from *os.File) []byte {
	_ = from.SetReadDeadline(time.Time{})
	pipe, err := from.SyscallConn()
	if err != nil {
		return nil // it is closed
	}
	text := make([]byte, 64<<10) // what a pipe has room for, pipe(7)
	length := 0
	_ = pipe.Read(func(fd uintptr) bool {
		length, _ = unix.Read(int(fd), text)
		return true
	})
	return text[:max(length, 0)]
}

// Running reports whether anything of the run lives; what cannot be known does.
func (run *Run) Running() bool {
	empty, err := run.Group.Empty()
	return err != nil || !empty
}

// Kill ends everything that the run has started, and a plugin that has moved itself out
// of its cgroup, within the limit; processes that do not go are cgroup.ErrBusy.
func (run *Run) Kill(limit time.Duration) error {
	run.kill()
	return run.Group.Kill(limit)
}

// End removes the cgroup of the run; nothing may run in it any more.
func (run *Run) End() error { return run.Group.Remove() }

const (
	// mostAnswer is how much a plugin may print; the pipe of one that prints more is
	// closed.
	mostAnswer = 4 << 20
	// mostStderr is how much is kept of the end of what it writes to stderr.
	mostStderr = 4 << 10
	// leftDelay is how long a plugin's pipes are read that something it has left holds.
	leftDelay = time.Second
	// busyPause is the pause between two tries to start a program that is being written.
	busyPause = 100 * time.Millisecond
)

// tail keeps the end of what a plugin writes to stderr.
type tail struct {
	mu   sync.Mutex
	text []byte
}

func (t *tail) Write(text []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, text...)
	t.text = append(t.text[:0], t.text[max(0, len(t.text)-mostStderr):]...)
	return len(text), nil
}

// String returns it in a form that an error and a gRPC status can have.
func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return redact.Printable(string(t.text))
}
