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
	// Group is the cgroup of the run, Deadline when its limit is over.
	Group    cgroup.Group
	Deadline time.Time

	mu      sync.Mutex
	reports []*Report
	// process is the plugin that runs, nil if none does; stderr is of the last one.
	process *os.Process
	stderr  *output
	killed  bool
}

// FindInPath returns the program of a plugin; for one that is missing its name, so that
// the chain goes on to ExecPlugin, which says so.
func (run *Run) FindInPath(plugin string, directories []string) (string, error) {
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
	run.reports, run.stderr = append(run.reports, report), &output{most: mostStderr, end: true}
	return report
}

// execute runs the program to its end and returns what it printed to stdout. A child
// that holds the plugin's input or output is waited for no longer than WaitDelay.
func (run *Run) execute(path string, stdin []byte, environment []string) ([]byte, error) {
	if !filepath.IsAbs(path) {
		return nil, fmt.Errorf("failed to find the plugin %s in %s: install it or set cni_bin_dir", path, directoriesOf(environment))
	}
	from, to, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("start the plugin: %w", err)
	}
	defer from.Close()
	command := &exec.Cmd{
		Path: path, Args: []string{path}, Env: environment, Stdin: bytes.NewReader(stdin), Stdout: to, Stderr: run.stderr,
		WaitDelay: leftDelay, SysProcAttr: &syscall.SysProcAttr{Setsid: true},
	}
	err = run.start(command)
	_ = to.Close()
	if err != nil {
		return nil, fmt.Errorf("start the plugin: %w", err)
	}
	stdout := &output{most: mostAnswer}
	read := make(chan struct{})
	go func() { // ends with the pipe, or in readRest
		defer close(read)
		if _, err := io.Copy(stdout, from); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			_ = from.Close() // it prints too much
		}
	}()
	err = command.Wait()
	run.mu.Lock()
	run.process = nil
	run.mu.Unlock()
	stdout.readRest(from, read)
	answer := stdout.now()
	if len(answer) > mostAnswer {
		return nil, fmt.Errorf("the answer has more than %d MiB, which no CNI result has", mostAnswer>>20)
	}
	if errors.Is(err, exec.ErrWaitDelay) {
		err = nil
	}
	return answer, err
}

// start starts the command in the cgroup of the run, unless that was killed.
func (run *Run) start(command *exec.Cmd) error {
	run.mu.Lock()
	killed := run.killed
	run.mu.Unlock()
	if killed {
		return errors.New("the run was killed")
	}
	if err := run.Group.Start(command); err != nil {
		return err
	}
	run.mu.Lock()
	run.process, killed = command.Process, run.killed
	run.mu.Unlock()
	if killed { // between the two looks
		_ = run.Kill(time.Second) // who has killed the run looks again
	}
	return nil
}

func directoriesOf(environment []string) string {
	for _, variable := range environment {
		if path, is := strings.CutPrefix(variable, "CNI_PATH="); is {
			return path
		}
	}
	return "no directory"
}

// Running reports whether anything of the run lives; what cannot be known does.
func (run *Run) Running() bool {
	empty, err := run.Group.Empty()
	return err != nil || !empty
}

// Kill ends everything that the run has started, and a plugin that has moved itself out
// of its cgroup, within the limit; processes that do not go are cgroup.ErrBusy.
func (run *Run) Kill(limit time.Duration) error {
	run.mu.Lock()
	run.killed = true
	if run.process != nil {
		_ = run.process.Kill() // it may have ended
	}
	run.mu.Unlock()
	if err := run.Group.Kill(limit); err != nil {
		return fmt.Errorf("kill the plugins: %w", err)
	}
	return nil
}

// End removes the cgroup of the run; nothing may run in it any more.
func (run *Run) End() error {
	if err := run.Group.Remove(); err != nil {
		return fmt.Errorf("end a run of plugins: %w", err)
	}
	return nil
}

const (
	// mostAnswer is how much a plugin may print; the pipe of one that prints more is
	// closed.
	mostAnswer = 4 << 20
	// mostStderr is how much is kept of the end of what it writes to stderr.
	mostStderr = 4 << 10
	// leftDelay is how long a plugin's pipes are read that something it has left holds.
	leftDelay = time.Second
)

// output keeps what a plugin prints: all, or the end.
type output struct {
	most int
	end  bool
	mu   sync.Mutex
	text []byte
}

func (o *output) Write(text []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.text = append(o.text, text...)
	switch over := len(o.text) - o.most; {
	case over > 0 && o.end:
		o.text = append(o.text[:0], o.text[over:]...)
	case over > 0:
		return 0, errors.New("the plugin prints too much")
	}
	return len(text), nil
}

// readRest reads what a plugin that has ended still has in its pipe, however busy the
// machine is. It does not wait for the end of what the plugin has left.
func (o *output) readRest(from *os.File, read <-chan struct{}) {
	select {
	case <-read:
		return
	case <-time.After(leftDelay):
	}
	_ = from.SetReadDeadline(time.Now())
	<-read
	_ = from.SetReadDeadline(time.Time{})
	pipe, err := from.SyscallConn()
	if err != nil {
		return // it is closed
	}
	_ = pipe.Read(func(fd uintptr) bool {
		rest := make([]byte, mostInPipe)
		if n, err := unix.Read(int(fd), rest); err == nil {
			_, _ = o.Write(rest[:n])
		}
		return true
	})
}

// mostInPipe is the size of a pipe (pipe(7)).
const mostInPipe = 64 << 10

func (o *output) now() []byte {
	o.mu.Lock()
	defer o.mu.Unlock()
	return bytes.Clone(o.text)
}
