package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/inspect"
	"github.com/minicri/minicri/internal/node"
	"github.com/minicri/minicri/internal/redact"
	"github.com/minicri/minicri/internal/timeline"
)

// timelineFlags are those of `minicri timeline`.
type timelineFlags struct {
	failed, asJSON bool
	since          time.Duration
	slowest        int
}

// timelineCommand is `minicri timeline`: the lives of pods.
func timelineCommand(ctx context.Context, arguments []string, output io.Writer) error {
	var f timelineFlags
	c, words, err := look(arguments, func(set *flag.FlagSet) {
		set.BoolVar(&f.failed, "failed", false, "")
		set.BoolVar(&f.asJSON, "json", false, "")
		set.DurationVar(&f.since, "since", 0, "")
		set.IntVar(&f.slowest, "slowest", 0, "")
	})
	if err != nil {
		return err
	}
	if err := f.check(words); err != nil {
		return usageError{err}
	}
	wanted := slices.Concat(words, []string{""})[0]
	all, err := findTimelines(ctx, c.Config, wanted)
	if err != nil {
		return err
	}
	if wanted != "" && len(all) == 0 {
		return fmt.Errorf("no timeline of %q is kept: `minicri timeline` lists all", wanted)
	}
	pods := f.choose(slices.Clone(all), time.Now())
	if wanted != "" && len(pods) == 0 {
		return fmt.Errorf("%q is there, and it is not what --failed or --since ask for", wanted)
	}
	return f.show(output, wanted, pods)
}

// check refuses what the flags cannot mean.
func (f timelineFlags) check(words []string) error {
	switch {
	case len(words) > 1:
		return fmt.Errorf("name one pod, id or container, not %q", words)
	case f.since < 0:
		return fmt.Errorf("--since %s is not in the past: --since 10m is the last ten minutes", f.since)
	case f.slowest < 0:
		return fmt.Errorf("--slowest %d: it is the number of pods to show", f.slowest)
	}
	return nil
}

// findTimelines asks the daemon, or where none runs, or answers, its files.
func findTimelines(ctx context.Context, c *config.Config, wanted string) ([]timeline.Pod, error) {
	pods, err := inspect.NewClient(inspect.DebugSocket(c.State)).Timelines(ctx, wanted)
	switch {
	case errors.Is(err, inspect.ErrNoAnswer):
		fmt.Fprintf(os.Stderr, "minicri: %s; this is what its files say\n", redact.Line(err.Error()))
	case !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ECONNREFUSED):
		return pods, err
	}
	identity, err := node.Read(c.Root)
	if err != nil {
		return nil, fmt.Errorf("no daemon answers at %s, and there are no files of one: %w", inspect.DebugSocket(c.State), err)
	}
	files := inspect.Files{Root: c.Root, State: c.State, Netns: func(id string) string { return filepath.Join(c.NetnsDir, identity.Mark()+id) }}
	return files.Timelines(wanted)
}

// choose leaves the pods that the flags ask for, in their order.
func (f timelineFlags) choose(pods []timeline.Pod, now time.Time) []timeline.Pod {
	pods = slices.DeleteFunc(pods, func(p timeline.Pod) bool {
		return f.failed && len(p.Problems()) == 0 || f.since > 0 && now.Sub(p.LastChange()) > f.since
	})
	if f.slowest > 0 {
		slices.SortStableFunc(pods, func(a, b timeline.Pod) int { return cmp.Compare(b.Took, a.Took) })
		pods = pods[:min(len(pods), f.slowest)]
	}
	return pods
}

func (f timelineFlags) show(output io.Writer, wanted string, pods []timeline.Pod) error {
	style := styleOf(output)
	switch {
	case f.asJSON:
		return writeJSON(output, append([]timeline.Pod{}, pods...)) // not null for none
	case wanted == "":
		return timeline.List(output, pods, time.Now(), style)
	}
	if err := pods[0].Text(output, style); err != nil || len(pods) == 1 {
		return err
	}
	// Of a pod with several attempts the last one is shown.
	_, err := fmt.Fprintf(output, "\nMore of this name, by id:\n")
	if err != nil {
		return err
	}
	return timeline.List(output, pods[1:], time.Now(), style)
}
