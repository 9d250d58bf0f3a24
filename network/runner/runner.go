package runner

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/state"
)

// Options say where runs live.
type Options struct {
	// Dir is the volatile directory of the runs, Program the path of the
	// program that stands in for plugins, on a file system that can execute.
	Dir, Program string
	// BinDirs is where plugins are looked for, in that order.
	BinDirs []string
	// Parent is the cgroup that those of the runs are made below.
	Parent cgroup.Group
	// Mark begins their names, and no others below Parent: what begins with it is
	// removed. It must not be empty.
	Mark string
}

// Runner begins runs, and finds those of an earlier daemon.
type Runner struct {
	options Options

	mu sync.Mutex
	// idle are the cgroups of the pool that no run has; closed is set by Close.
	idle   []cgroup.Group
	closed bool
	// parentMade is set if the parent was not there before the pool.
	parentMade bool
	// programs are the plugins that are installed, listed the state of their
	// directories then; "" if their times may miss the next change.
	programs map[string]string
	listed   string
	// linked are the names that have a link in pluginsDir.
	linked map[string]bool
}

// Open installs the program and makes the directory. Runs has to be called
// before the first Begin, Close at the end.
func Open(options Options) (*Runner, error) {
	if options.Mark == "" {
		return nil, errors.New("open the plugin runs: without a mark every cgroup below the parent would be taken for a run's")
	}
	r := &Runner{options: options, linked: make(map[string]bool)}
	if err := install(options.Program); err != nil {
		return nil, err
	}
	if err := mountPlace(options.Dir); err != nil {
		return r, err
	}
	if err := os.MkdirAll(r.pluginsDir(), 0o700); err != nil {
		return r, fmt.Errorf("make the directory of links to the program: %w", err)
	}
	return r, nil
}

// Runs are the runs that an earlier daemon left: those that were not over when
// it ended, and those that are done and have left processes to live. An error says
// which were not found: one without its file, or with half of it, was removed if nothing
// runs in it, and one whose file cannot be read was left alone.
func (r *Runner) Runs() (unfinished, done []*Run, err error) {
	names, err := runsIn(r.options.Dir)
	if err != nil {
		return nil, nil, fmt.Errorf("find the plugin runs of an earlier daemon: %w", err)
	}
	var errs []error
	for _, name := range names {
		run, err := r.find(name)
		switch {
		case err != nil:
			errs = append(errs, err)
		case run.isDone():
			done = append(done, run)
		default:
			unfinished = append(unfinished, run)
		}
	}
	left := slices.Concat(unfinished, done)
	return unfinished, done, errors.Join(append(errs, r.sweep(left), r.fillPool(left))...)
}

// sweep removes the cgroups of runs whose files are gone, with a volatile
// directory that was emptied by hand, say. What runs in them is left alone:
// its name does not say which run it was for.
func (r *Runner) sweep(left []*Run) error {
	explained := make(map[string]bool)
	for _, run := range left {
		explained[run.Group.Dir] = true
	}
	entries, err := os.ReadDir(r.options.Parent.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, entry := range entries {
		group := r.options.Parent.Child(entry.Name())
		if !strings.HasPrefix(entry.Name(), r.options.Mark) || explained[group.Dir] {
			continue
		}
		if empty, err := group.Empty(); err != nil || !empty {
			errs = append(errs, errors.Join(fmt.Errorf("cgroup %s has processes of an unknown plugin run", group.Dir), err))
			continue
		}
		if !strings.HasPrefix(entry.Name(), r.options.Mark+poolName) {
			errs = append(errs, group.Remove())
		}
	}
	return errors.Join(errs...)
}

func (r *Runner) find(name string) (*Run, error) {
	run := &Run{runner: r, dir: filepath.Join(r.options.Dir, name)}
	data, err := state.ReadFile(filepath.Join(run.dir, "request.json"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("plugin run %s, which is left alone: %w", name, err)
	}
	if err == nil {
		err = json.Unmarshal(data, run)
	}
	if err != nil {
		// Nothing enters the cgroup before the file is written: without one there is
		// no process.
		run.Group = r.options.Parent.Child(r.options.Mark + name)
		return nil, errors.Join(fmt.Errorf("plugin run %s: %w", name, err), run.End())
	}
	return run, nil
}
