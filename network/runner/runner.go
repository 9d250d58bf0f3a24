// Package runner runs CNI plugins so that it is known which processes belong
// to a run, and how each plugin ended.
//
// A run is one verb over the plugins of one network configuration, and the Exec of libcni
// (invoke.Exec) for it. It starts each plugin in a cgroup of the run, where everything
// stays that the plugin starts, and in a session of its own, so that a signal to its
// process group reaches no process of another's. A DEL that fails does not end the chain:
// the other plugins get theirs, and libcni hears of the failure from the last one.
//
// A run is over when every plugin has answered, or when it is killed. It has no file: the
// name of its cgroup has the verb, the id and the end of its limit, which is all that the
// next daemon needs to wait for one that is not over.
//
// Run.mu guards the reports, and is held for moments.
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
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/version"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/redact"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/internal/trace"
)

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

// Runner begins runs, and finds those of an earlier daemon.
type Runner struct {
	// parent is the cgroup that those of the runs are made below.
	parent cgroup.Group
	mark   string
}

// Open makes the parent of the cgroups. The mark begins the names of those of runs, and
// no others below the parent: what begins with it is removed. It must not be empty.
func Open(parent cgroup.Group, mark string) (*Runner, error) {
	if mark == "" {
		return nil, errors.New("open the plugin runs: without a mark every cgroup below the parent would be taken for a run's")
	}
	return &Runner{parent: parent, mark: mark}, parent.Make()
}

// Begin makes a run. End has to be called.
func (r *Runner) Begin(request Request) (*Run, error) {
	run := &Run{Request: request}
	run.alive, run.kill = context.WithCancel(context.Background())
	// No clock that somebody sets is in the name.
	run.Group = r.parent.Child(fmt.Sprintf("%s%s-%s-%x", r.mark, run.Verb, run.ID, uint64(process.Monotonic()+request.Limit)))
	if err := run.Group.Make(); err != nil {
		return nil, fmt.Errorf("begin a run of plugins: %w", err)
	}
	return run, nil
}

// Left are the runs whose processes an earlier daemon left. Cgroups in which nothing
// runs are removed; the error names what could not be looked at, or is no run's.
func (r *Runner) Left() (left []*Run, err error) {
	entries, err := os.ReadDir(r.parent.Dir)
	errs := []error{err}
	for _, entry := range entries {
		name, ours := strings.CutPrefix(entry.Name(), r.mark)
		if !ours || !entry.IsDir() {
			continue
		}
		run := &Run{Group: r.parent.Child(entry.Name()), kill: func() {}}
		switch empty, err := run.Group.Empty(); {
		case err != nil:
			errs = append(errs, err)
		case empty:
			errs = append(errs, run.Group.Remove())
		case !run.parse(name):
			errs = append(errs, fmt.Errorf("cgroup %s has processes of an unknown plugin run", run.Group.Dir))
		default:
			left = append(left, run)
		}
	}
	return left, errors.Join(errs...)
}

// parse reads what the name of the run's cgroup has after the mark.
func (run *Run) parse(name string) bool {
	first, last := strings.IndexByte(name, '-'), strings.LastIndexByte(name, '-')
	if first == last {
		return false
	}
	end, err := strconv.ParseUint(name[last+1:], 16, 63)
	run.Verb, run.ID = name[:first], name[first+1:last]
	run.Deadline = time.Now().Add(max(time.Duration(end)-process.Monotonic(), 0))
	return err == nil
}

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
	report := &Report{Plugin: step.Plugin{Name: filepath.Base(path), Verb: run.Verb, Killed: true}, Start: time.Now()}
	run.mu.Lock()
	run.reports, run.stderr = append(run.reports, report), &tail{}
	run.mu.Unlock()
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
