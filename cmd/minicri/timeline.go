package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/minicri/minicri/internal/manual"
	"github.com/minicri/minicri/internal/redact"
	"github.com/minicri/minicri/internal/timeline"
)

func timelineCommand(cmd *cobra.Command, arguments []string) error {
	c, err := look(cmd)
	if err != nil {
		return err
	}
	since, _ := cmd.Flags().GetDuration("since") // the flags have these types
	slowest, _ := cmd.Flags().GetInt("slowest")
	switch {
	case since < 0:
		return manual.Misused("--since %s is in the future: --since 10m means the last ten minutes", since)
	case slowest < 0:
		return manual.Misused("--slowest %d: give the number of pods to show", slowest)
	}
	wanted := strings.Join(arguments, " ") // the list prints "image REFERENCE"
	if c.has("follow") {
		return c.follow(cmd, wanted)
	}
	pods, err := findTimelines(cmd.Context(), c.Config, wanted)
	if err != nil {
		return err
	}
	if wanted != "" && len(pods) == 0 {
		return fmt.Errorf("no timeline of %q is kept: `minicri timeline` lists all", wanted)
	}
	pods = slices.DeleteFunc(pods, func(p timeline.Pod) bool {
		return c.has("failed") && len(p.Problems()) == 0 || since > 0 && time.Since(p.LastChange()) > since
	})
	if slowest > 0 {
		slices.SortStableFunc(pods, func(a, b timeline.Pod) int { return cmp.Compare(b.Took, a.Took) })
		pods = pods[:min(len(pods), slowest)]
	}
	if wanted != "" && len(pods) == 0 {
		return fmt.Errorf("%q has no timeline that --failed and --since select", wanted)
	}
	if file := c.text("html"); file != "" {
		return writeFile(file, false, func(page io.Writer) error { return timeline.HTML(page, pods, version) })
	}
	return c.show(cmd, append([]timeline.Pod{}, pods...), func(output io.Writer) error { // not null for none
		return printTimelines(output, pods, wanted != "", styleOf(output))
	})
}

// printTimelines prints a list or, if a name was given, the waterfall of the newest pod and a list of the others.
func printTimelines(output io.Writer, pods []timeline.Pod, named bool, style timeline.Style) error {
	if !named {
		return timeline.List(output, pods, time.Now(), style)
	}
	if err := pods[0].Text(output, style); err != nil || len(pods) == 1 {
		return err
	}
	fmt.Fprintf(output, "\nMore of this name, by id:\n")
	return timeline.List(output, pods[1:], time.Now(), style)
}

// follow prints each step when it has ended, and each failure, until the context ends.
func (c call) follow(cmd *cobra.Command, wanted string) error {
	ctx, output := cmd.Context(), cmd.OutOrStdout()
	style := styleOf(output)
	shown := make(map[string]bool)
	for first := true; ; first = false {
		pods, err := findTimelines(ctx, c.Config, wanted)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		for _, e := range timeline.Events(pods) {
			if key := e.Key(); !shown[key] {
				shown[key] = true
				if first && wanted == "" {
					continue // the past of the whole node is long
				}
				fmt.Fprintln(output, redact.Line(e.Text(style)))
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(followPeriod):
		}
	}
}
