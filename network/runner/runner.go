package runner

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/process"
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
	run.Group = r.parent.Child(r.mark + run.name(process.Monotonic()+request.Limit))
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

// name is that of the run's cgroup, without the mark. No clock that somebody sets is
// in it.
func (run *Run) name(end time.Duration) string {
	return fmt.Sprintf("%s-%s-%x", run.Verb, run.ID, uint64(max(end, 0)))
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
