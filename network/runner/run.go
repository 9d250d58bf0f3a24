package runner

import (
	"bytes"
	"context"
	"errors"
	"fmt"
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
	// process is the plugin that runs, nil if none does; killed is set by Kill.
	process *os.Process
	stderr  *output
	killed  bool
}

// Begin makes a run. End has to be called.
func (r *Runner) Begin(request Request) (*Run, error) {
	run := &Run{Request: request, Deadline: time.Now().Add(request.Limit)}
	run.Group = r.parent.Child(r.mark + run.name(monotonic()+request.Limit))
	if err := run.Group.Make(); err != nil {
		return nil, fmt.Errorf("begin a run of plugins: %w", err)
	}
	return run, nil
}

// FindInPath returns the program of a plugin; for one that is missing its name, so that
// the chain goes on to ExecPlugin, which says so.
func (run *Run) FindInPath(plugin string, directories []string) (string, error) {
	if !isName(plugin) {
		return "", fmt.Errorf("the plugin's type %q is no name of a file", plugin)
	}
	if path, err := invoke.FindInPath(plugin, directories); err == nil {
		return path, nil
	}
	return plugin, nil
}

// ExecPlugin runs a plugin and returns what it printed. A DEL that fails is an error
// of the last plugin of the chain only: libcni ends the chain at one, and forgets what
// ADD made at none.
func (run *Run) ExecPlugin(ctx context.Context, path string, stdin []byte, environment []string) ([]byte, error) {
	report := run.begin(filepath.Base(path))
	answer, err := run.execute(path, stdin, append(environment, trace.Environment(ctx)...))
	run.end(report, answer, err)
	if run.Verb != "DEL" {
		return answer, report.Err()
	}
	if reports := run.Reports(); len(reports) >= run.Plugins {
		return nil, run.Verdict(reports)
	}
	return nil, nil
}

func (run *Run) begin(plugin string) *Report {
	report := &Report{Plugin: plugin, Verb: run.Verb, Start: time.Now()}
	run.mu.Lock()
	defer run.mu.Unlock()
	run.reports = append(run.reports, report)
	return report
}

// errKilled: the run is over, and nothing is started in it any more.
var errKilled = errors.New("not started: the run was killed")

// execute runs the program to its end and returns what it printed to stdout.
func (run *Run) execute(path string, stdin []byte, environment []string) ([]byte, error) {
	if !filepath.IsAbs(path) {
		return nil, fmt.Errorf("failed to find the plugin %s in %s: install it or set cni_bin_dir", path, directoriesOf(environment))
	}
	var stdout, stderr output
	var command *exec.Cmd
	for tries := 0; ; tries++ {
		command = &exec.Cmd{Path: path, Args: []string{path}, Env: environment, Stdin: bytes.NewReader(stdin), WaitDelay: time.Second}
		command.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		err := run.start(command, &stdout, &stderr)
		if err == nil {
			break
		}
		const mostTries = 5 // as libcni has it
		if !errors.Is(err, unix.ETXTBSY) || tries == mostTries {
			return nil, fmt.Errorf("start the plugin: %w", err)
		}
		time.Sleep(time.Second) // it is being installed
	}
	err := command.Wait()
	run.mu.Lock()
	run.process = nil
	run.mu.Unlock()
	answer := stdout.end()
	stderr.end()
	if stdout.tooMuch {
		return nil, fmt.Errorf("the answer has more than %d MiB, which no CNI result has", mostAnswer>>20)
	}
	if errors.Is(err, exec.ErrWaitDelay) { // something that it left holds its input
		err = nil
	}
	return answer, err
}

// start starts the command in the cgroup of the run, its output in two pipes.
func (run *Run) start(command *exec.Cmd, stdout, stderr *output) error {
	if run.isKilled() {
		return errKilled
	}
	var err error
	if command.Stdout, err = stdout.open(mostAnswer, func() { _ = command.Process.Kill() }); err != nil {
		return err
	}
	if command.Stderr, err = stderr.open(mostStderr, nil); err == nil {
		err = run.Group.Start(command)
	}
	if err != nil {
		stdout.abandon()
		stderr.abandon()
		return err
	}
	run.mu.Lock()
	run.process, run.stderr = command.Process, stderr
	killed := run.killed
	run.mu.Unlock()
	stdout.follow()
	stderr.follow()
	if killed { // between the two looks
		return errors.Join(run.Kill(0), nil)
	}
	return nil
}

func (run *Run) isKilled() bool {
	run.mu.Lock()
	defer run.mu.Unlock()
	return run.killed
}

func directoriesOf(environment []string) string {
	for _, variable := range environment {
		if path, is := strings.CutPrefix(variable, "CNI_PATH="); is {
			return path
		}
	}
	return ""
}

// Running reports whether a process of the run lives.
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
