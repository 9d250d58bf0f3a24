// Package runner runs CNI plugins, and knows which processes belong to a run and how each plugin ended.
//
// A run is one verb over the plugins of a network, and libcni's Exec for it (invoke.Exec). Each plugin starts
// in the run's cgroup, where its children stay, and in its own session, so that signals to its process group
// reach nobody else. A DEL that fails or hangs does not end the chain, unless its plugin cannot
// be killed: libcni hears of it from the last plugin.
//
// A run is over when every plugin has answered or when it is killed. It has no file: its cgroup's name has
// the verb, the ID and the deadline, which the next daemon needs to wait for it. Run.mu guards the reports.
package runner

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/redact"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/internal/trace"
)

const (
	// maxAnswer limits stdout: then we close the pipe. maxStderr is how much of the end of stderr we keep.
	maxAnswer = 4 << 20
	maxStderr = 4 << 10
	// leftDelay is how long we read a plugin's pipes that its children still hold.
	leftDelay = time.Second
	busyPause = 100 * time.Millisecond // between two tries to start a program that is being written
)

// Runner begins runs and finds those of an earlier daemon.
type Runner struct {
	// Exec runs a plugin's program until it ends, or ctx does, and returns its stdout; nil starts it in the run's cgroup.
	Exec   func(ctx context.Context, run *Run, path string, stdin []byte, environment []string) ([]byte, error)
	parent cgroup.Group
	mark   string
}

// Open makes the parent of the cgroups. The mark, not empty, begins the names of runs' cgroups and no others.
func Open(parent cgroup.Group, mark string) (*Runner, error) {
	if mark == "" {
		return nil, errors.New("open the plugin runs: without a mark every cgroup below the parent would be taken for a run's")
	}
	return &Runner{parent: parent, mark: mark}, parent.Make()
}

// Begin makes a run. The caller has to call End.
func (r *Runner) Begin(request Request) (*Run, error) {
	run := &Run{Request: request, exec: r.Exec}
	run.alive, run.kill = context.WithCancel(context.Background())
	// The monotonic clock cannot be set.
	run.Group = r.parent.Child(fmt.Sprintf("%s%s-%s-%x", r.mark, run.Verb, run.ID, uint64(process.Monotonic()+request.Time())))
	if err := run.Group.Make(); err != nil {
		return nil, fmt.Errorf("begin a run of plugins: %w", err)
	}
	return run, nil
}

// Left returns earlier runs with processes and removes empty ones. The error names what is no run.
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

// Request describes a run.
type Request struct {
	Verb string
	// ID is the sandbox, "" for verbs without one. The chain has so many Plugins.
	ID, Network string
	Plugins     int
	// Limit is that of the run, or of each plugin for DEL: one that is killed at it keeps no other from its DEL.
	Limit time.Duration
}

// Time returns how long the run may take.
func (r Request) Time() time.Duration {
	if r.Verb == "DEL" {
		return time.Duration(max(r.Plugins, 1)) * (r.Limit + leftDelay)
	}
	return r.Limit
}

// Run is a run of a verb over a chain of plugins, and libcni's Exec for it.
type Run struct {
	Request
	version.PluginDecoder
	Group cgroup.Group
	// Deadline is when the limit of an earlier daemon's run ends.
	Deadline time.Time
	// Until is when the caller ends the run; zero is never.
	Until time.Time
	// Sought counts the calls of FindInPath.
	Sought int
	// alive ends with Kill, and the running plugin with it.
	alive   context.Context
	kill    context.CancelFunc
	exec    func(ctx context.Context, run *Run, path string, stdin []byte, environment []string) ([]byte, error)
	mu      sync.Mutex
	reports []*Report
	// stderr is that of the last plugin, searched the directories of the last FindInPath.
	stderr   *tail
	searched []string
}

// FindInPath returns the path of a plugin's program, or its name if it is missing: ExecPlugin reports that.
func (run *Run) FindInPath(plugin string, directories []string) (string, error) {
	run.searched = directories
	run.Sought++
	if path, err := invoke.FindInPath(plugin, directories); err == nil {
		return path, nil
	}
	return filepath.Base(plugin), nil
}

// ExecPlugin runs a plugin and returns what it printed. Only the last plugin of the chain reports failed
// DELs: libcni ends the chain at an error, and forgets what ADD made if there is none.
func (run *Run) ExecPlugin(ctx context.Context, path string, stdin []byte, environment []string) ([]byte, error) {
	if run.alive.Err() != nil {
		return nil, errors.New("the run is over") // the rest of the chain does not begin
	}
	report := &Report{Plugin: step.Plugin{Name: filepath.Base(path), Verb: run.Verb, Killed: true}, Start: time.Now()}
	run.mu.Lock()
	run.reports, run.stderr = append(run.reports, report), &tail{}
	run.mu.Unlock()
	answer, err := run.start(path, stdin, append(environment, trace.Environment(ctx)...))
	run.end(report, answer, err)
	// The next plugin needs a new cgroup: Linux kills what is cloned into one that was killed before.
	if report.Killed && run.alive.Err() == nil && errors.Join(run.Group.Remove(), run.Group.Make()) != nil {
		run.kill()
	}
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

func (run *Run) start(path string, stdin []byte, environment []string) ([]byte, error) {
	if run.exec == nil {
		return run.execute(path, stdin, environment)
	}
	alive, cancel := context.WithTimeout(run.alive, run.Limit)
	defer cancel()
	return run.exec(alive, run, path, stdin, environment)
}

// execute runs the program and returns its stdout. For children that hold its pipes it waits up to twice leftDelay:
// for those of stdin and stderr, and then for that of stdout.
func (run *Run) execute(path string, stdin []byte, environment []string) ([]byte, error) {
	if !filepath.IsAbs(path) {
		return nil, fmt.Errorf("failed to find the plugin %s in %s: install it or set cni_bin_dir", path, strings.Join(run.searched, ":"))
	}
	from, to, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("start the plugin: %w", err)
	}
	defer from.Close()
	alive, cancel := context.WithTimeout(run.alive, run.Limit) // of other verbs the run ends then, too
	defer cancel()
	var command *exec.Cmd
	ended := make(chan error, 2)
	for began := time.Now(); ; time.Sleep(busyPause) {
		command = exec.CommandContext(alive, path)
		command.Cancel = func() error {
			err := errors.Join(command.Process.Kill(), run.Group.Kill(process.KillLimit))
			if errors.Is(err, cgroup.ErrBusy) {
				ended <- err // it cannot be waited for
			}
			return err
		}
		command.Env, command.Stdin, command.Stdout, command.Stderr = environment, bytes.NewReader(stdin), to, run.stderr
		command.WaitDelay, command.SysProcAttr = leftDelay, &syscall.SysProcAttr{Setsid: true}
		// An installer may still be writing the program. Half of the limit leaves time to report that.
		if err = run.Group.Start(command); !errors.Is(err, unix.ETXTBSY) || time.Since(began) > run.Limit/2 {
			break
		}
	}
	_ = to.Close()
	if err != nil {
		return nil, fmt.Errorf("start the plugin: %w", err)
	}
	var answer bytes.Buffer
	read := make(chan error, 1)
	go func() { // ends with the pipe, or at the deadline
		n, err := io.Copy(&answer, io.LimitReader(from, maxAnswer+1))
		if n > maxAnswer {
			_ = from.Close() // the plugin ends when it prints more
		}
		read <- err
	}()
	go func() { ended <- command.Wait() }()
	err = <-ended
	_ = from.SetReadDeadline(time.Now().Add(leftDelay))
	if errors.Is(<-read, os.ErrDeadlineExceeded) {
		answer.Write(rest(from))
	}
	if answer.Len() > maxAnswer {
		return nil, fmt.Errorf("the answer has more than %d MiB, which no CNI result has", maxAnswer>>20)
	}
	switch {
	case errors.Is(err, exec.ErrWaitDelay):
		err = nil
	case err != nil && alive.Err() != nil:
		err = alive.Err() // it was killed
	}
	return answer.Bytes(), err
}

// rest reads what an exited plugin left in its pipe: on a busy machine, the deadline may precede any read.
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

// Running reports whether any process of the run lives, or may live.
func (run *Run) Running() bool {
	empty, err := run.Group.Empty()
	return err != nil || !empty
}

// Kill kills all that is in the cgroup of the run, and the plugin itself, wherever it is. After the limit it returns cgroup.ErrBusy.
func (run *Run) Kill(limit time.Duration) error {
	run.kill()
	return run.Group.Kill(limit)
}

// End removes the run's cgroup, which must be empty.
func (run *Run) End() error { return run.Group.Remove() }

// tail keeps the end of a plugin's stderr.
type tail struct {
	mu   sync.Mutex
	text []byte
}

func (t *tail) Write(text []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, text...)
	t.text = append(t.text[:0], t.text[max(0, len(t.text)-maxStderr):]...)
	return len(text), nil
}

// String returns it printable, as errors and gRPC statuses need it.
func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return redact.Printable(string(t.text))
}

// Report is what became of one plugin. Of a killed or running one we know only Stderr. Exit is -1 if it could
// not run. A success that is no JSON object, so no result (CNI SPEC, "Success"), has a Message.
type Report struct {
	step.Plugin
	Start time.Time
	Took  time.Duration
	Late  bool // it was killed at its own limit
}

func (run *Run) end(r *Report, answer []byte, err error) {
	run.mu.Lock()
	defer run.mu.Unlock()
	r.Took, r.Stderr, r.Late = time.Since(r.Start), run.stderr.String(), errors.Is(err, context.DeadlineExceeded)
	r.Killed = r.Late || run.alive.Err() != nil
	// Its own timer may be the quicker one on a busy machine, where the caller's limit was over first.
	r.Late = r.Late && (run.Until.IsZero() || !run.Until.Before(r.Start.Add(run.Limit)))
	exit, ran := errors.AsType[*exec.ExitError](err)
	switch {
	case r.Killed:
	case ran:
		if status := exit.Sys().(syscall.WaitStatus); status.Signaled() {
			r.Signal = int(status.Signal())
		} else {
			r.Exit = status.ExitStatus()
		}
		r.takeError(answer)
	case err != nil:
		r.Exit, r.Message = -1, err.Error()
	case run.Verb == "ADD" && !bytes.HasPrefix(bytes.TrimSpace(answer), []byte{'{'}):
		r.Message = fmt.Sprintf("what it printed is no CNI result: %.120q", answer)
	case run.Verb == "ADD": // an error with the exit code of success is no result either
		if r.takeError(answer); r.Code == 0 {
			r.Message = ""
		}
	}
}

// takeError reads the CNI error in what the plugin printed.
func (r *Report) takeError(text []byte) {
	var answer types.Error
	switch err := json.Unmarshal(text, &answer); {
	case len(text) == 0:
	case err != nil:
		r.Message = shown(fmt.Sprintf("an answer that is no CNI error: %q", text[:min(len(text), maxShown)]))
	default:
		r.Code, r.Message, r.Details = answer.Code, shown(answer.Msg), shown(answer.Details)
	}
}

// Reports returns those of the plugins started so far, in order.
func (run *Run) Reports() []Report {
	run.mu.Lock()
	defer run.mu.Unlock()
	reports := make([]Report, 0, len(run.reports))
	for _, report := range run.reports {
		reports = append(reports, *report)
	}
	if last := len(reports) - 1; last >= 0 && reports[last].Took == 0 {
		reports[last].Took, reports[last].Stderr = time.Since(reports[last].Start), run.stderr.String()
	}
	return reports
}

// Failed reports whether the plugin did not succeed.
func (r Report) Failed() bool { return r.Killed || r.Exit != 0 || r.Signal != 0 || r.Code != 0 }

// Text returns why the plugin failed, without its name, or "".
func (r Report) Text() string {
	text, said := "", r.Message
	if said != "" && r.Details != "" {
		said += "; " + r.Details
	}
	switch {
	case !r.Failed():
		return said
	case r.Killed:
		text = "it did not answer"
	case r.Signal != 0:
		text = fmt.Sprintf("it was ended by signal %d (%v)", r.Signal, syscall.Signal(r.Signal))
	case said != "":
		return said
	case r.Code != 0:
		text, said = fmt.Sprintf("exit code %d, CNI error %d without a message", r.Exit, r.Code), r.Details
	default:
		text = fmt.Sprintf("exit code %d without a CNI error", r.Exit)
	}
	const lastWords = 300
	words := strings.TrimSpace(r.Stderr)
	if said = cmp.Or(said, strings.ToValidUTF8(words[max(0, len(words)-lastWords):], "")); said != "" {
		text += ": " + said
	}
	return text
}

// Verdict returns nil if every plugin of the chain has succeeded.
func (run *Run) Verdict() error {
	if reports := run.Reports(); len(reports) < run.Plugins || slices.ContainsFunc(reports, Report.Failed) {
		return errors.New("not every plugin of the chain has succeeded")
	}
	return nil
}

// maxShown limits a plugin's words in an error: the kubelet makes an event of at most 1 KiB of it.
const maxShown = 700

func shown(text string) string {
	if text = redact.Printable(text); len(text) <= maxShown {
		return text
	}
	return fmt.Sprintf("%s... (%d bytes)", strings.ToValidUTF8(text[:maxShown], ""), len(text))
}
