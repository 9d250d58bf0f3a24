package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/network/runner"
	"github.com/minicri/minicri/test/bench/contender"
)

const (
	// plugin is one of the real ones, in a verb that does nothing: what is left
	// is the process.
	plugin   = "host-local"
	runTimes = 200
)

// runs measures what a run of one plugin takes alone, and through the runner
// with all that the daemon does for a run.
func (m *measurement) runs(ctx context.Context) error {
	parent := contender.Must(cgroup.GroupParent(m.node.Config.CgroupParent))
	r := contender.Must(runner.Open(parent, "bench-cni-"))
	program := filepath.Join(m.node.Config.CNIBin, plugin)
	for range runTimes {
		err := errors.Join(
			m.time("plugin alone", func() error { return call(ctx, program) }),
			m.time("plugin by the runner", func() error { return runOnce(ctx, r, program) }),
		)
		if err != nil {
			return err
		}
	}
	return nil
}

func runOnce(ctx context.Context, r *runner.Runner, program string) error {
	run := contender.Must(r.Begin(runner.Request{Verb: "VERSION", Network: "bench", Plugins: 1, Limit: time.Minute}))
	_, err := run.ExecPlugin(ctx, program, nil, []string{"CNI_COMMAND=VERSION"})
	return errors.Join(err, run.End())
}

func call(ctx context.Context, program string) error {
	command := exec.CommandContext(ctx, program)
	command.Env = []string{"CNI_COMMAND=VERSION"}
	if output, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", program, err, output)
	}
	return nil
}
