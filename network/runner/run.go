package runner

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/cgroup"
)

// Request says what is run.
type Request struct {
	Verb string `json:"verb"`
	// ID is the sandbox that it is for, "" for the verbs that are for none.
	ID      string `json:"id,omitempty"`
	Network string `json:"network"`
	// Plugins are the types of the chain, in the order of the configuration.
	Plugins []string `json:"plugins"`
	// Limit is how long the run may take.
	Limit time.Duration `json:"limit"`
}

// Run is one run of a verb over a chain of plugins.
type Run struct {
	Request
	// Group is the cgroup of the run.
	Group cgroup.Group `json:"group"`
	// Began is when the run did, by a clock that nobody sets (CLOCK_MONOTONIC); 0 in
	// runs of versions that did not note it.
	Began time.Duration `json:"began,omitempty"`

	dir    string
	runner *Runner
	// ended is set when the cgroup is given back, killed by Kill.
	ended, killed bool
}

// Begin makes a run: its files first and then its cgroup, so that there is no
// cgroup that no file describes. End has to be called, also where a run is returned
// with an error: then it could not be removed yet.
func (r *Runner) Begin(request Request) (*Run, error) {
	random := make([]byte, 8)
	_, _ = rand.Read(random) // never fails
	name := hex.EncodeToString(random)
	run := &Run{Request: request, Group: r.group(name), Began: monotonic(), dir: filepath.Join(r.options.Dir, name), runner: r}
	installed, err := r.installed()
	if err == nil {
		err = r.link(installed, request.Plugins)
	}
	if err == nil {
		err = run.writeFiles(r.options, installed)
	}
	if err == nil { // one of the pool is there
		err = run.Group.Make()
	}
	if err == nil {
		return run, nil
	}
	err = fmt.Errorf("prepare the run of plugins: %w", err)
	if endErr := run.End(); endErr != nil {
		return run, errors.Join(err, endErr)
	}
	return nil, err
}

func (run *Run) writeFiles(options Options, installed map[string]string) error {
	request, err := json.Marshal(run)
	if err != nil {
		return err
	}
	if err := os.Mkdir(run.dir, 0o700); err != nil {
		return err
	}
	return errors.Join(
		os.WriteFile(filepath.Join(run.dir, "request.json"), request, 0o600),
		os.WriteFile(filepath.Join(run.dir, "run"), run.settings(options, installed), 0o600),
		os.Symlink(filepath.Join("..", pluginsName), run.PluginDir()),
	)
}

// settings are what the program reads: fields that each end with a zero byte.
func (run *Run) settings(options Options, installed map[string]string) []byte {
	version := "1"
	if run.Group.V2 {
		version = "2"
	}
	fields := []string{version, run.Group.Entrance(), strconv.Itoa(len(run.Plugins)), strings.Join(options.BinDirs, ":")}
	for name, program := range installed {
		fields = append(fields, name, program)
	}
	return []byte(strings.Join(fields, "\x00") + "\x00")
}

func monotonic() time.Duration {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) // never fails
	return time.Duration(now.Nano())
}

// Deadline is when the limit of the run is over, whichever daemon waits for it: one
// that starts again and again does not make it longer. It is now for a run whose limit
// was over before: what is killed then has its time to end.
func (run *Run) Deadline() time.Time {
	past := monotonic() - run.Began
	if run.Began == 0 || past < 0 { // an earlier version; another time namespace
		past = 0
	}
	return time.Now().Add(max(run.Limit-past, 0))
}

// PluginDir is the directory of plugins that go-cni is given for this run.
func (run *Run) PluginDir() string { return filepath.Join(run.dir, "p") }

// firstInterval is between two looks for the first plugin; it grows with the time that
// has been waited: a plugin that is kept from its cgroup costs next to nothing.
const firstInterval = 200 * time.Microsecond

// AwaitFirst waits until the first plugin of the run with that directory of
// plugins has entered the run's cgroup; it reports false if the context ends
// first.
func AwaitFirst(ctx context.Context, pluginDir string) bool {
	note := filepath.Join(filepath.Dir(pluginDir), "n0")
	for began := time.Now(); ; {
		if _, err := os.Lstat(note); err == nil {
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(max(firstInterval, time.Since(began)/8)):
		}
	}
}

// Running reports whether a process of the run lives.
func (run *Run) Running() bool {
	empty, err := run.Group.Empty()
	return err != nil || !empty
}

// Kill ends everything that the run has started, within the limit; processes
// that do not go are cgroup.ErrBusy.
func (run *Run) Kill(limit time.Duration) error {
	run.killed = true
	if err := run.Group.Kill(limit); err != nil {
		return fmt.Errorf("kill the plugins: %w", err)
	}
	return nil
}

// Done marks a run that is over and whose processes are to live.
func (run *Run) Done() error {
	return os.WriteFile(filepath.Join(run.dir, "done"), nil, 0o600)
}

func (run *Run) isDone() bool {
	_, err := os.Stat(filepath.Join(run.dir, "done"))
	return !errors.Is(err, fs.ErrNotExist)
}

// End removes the run; nothing may run in it any more. A second call does
// nothing.
func (run *Run) End() error {
	if run.ended {
		return nil
	}
	if err := awaitEmpty(run.Group); err != nil {
		return fmt.Errorf("end a run of plugins: %w", err)
	}
	// The files first: a plugin that is started late finds none, and does not enter
	// the cgroup, which another run may have then.
	if err := os.RemoveAll(run.dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("end a run of plugins: %w", err)
	}
	run.ended = true
	if err := run.runner.giveBack(run.Group, run.killed); err != nil {
		return fmt.Errorf("end a run of plugins: %w", err)
	}
	return nil
}
