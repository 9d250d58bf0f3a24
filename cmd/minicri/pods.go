package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/term"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/inspect"
	"github.com/minicri/minicri/internal/node"
	"github.com/minicri/minicri/internal/redact"
	"github.com/minicri/minicri/internal/timeline"
)

func podsCommand(ctx context.Context, arguments []string, output io.Writer) error {
	c, err := look(ctx, "pods", arguments)
	if err != nil {
		return err
	}
	form := cmp.Or(c.text("o"), "table")
	if c.has("json") {
		form = "json"
	}
	if len(c.words) > 1 || !slices.Contains([]string{"table", "json", "yaml"}, form) {
		return misused("usage: minicri pods [POD] [-o table|json|yaml]")
	}
	if phases := []string{timeline.Ready, timeline.NotReady, timeline.Building}; c.text("phase") != "" && !slices.Contains(phases, c.text("phase")) {
		return misused("--phase %q: a pod is %q", c.text("phase"), phases)
	}
	daemon := inspect.NewClient(inspect.DebugSocket(c.State))
	var earlier *timeline.Glance
	for {
		now, err := daemon.Glance(ctx)
		if ctx.Err() != nil && c.has("watch") {
			return nil
		}
		if err != nil {
			return fmt.Errorf("list the pods: %w", err)
		}
		now.Pods = slices.DeleteFunc(now.Pods, func(l timeline.Line) bool { return !asked(l, strings.Join(c.words, ""), c.text("n"), c.text("phase")) })
		if err := c.showPods(output, form, now, earlier); err != nil || !c.has("watch") {
			return err
		}
		earlier = now
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(watchPeriod):
		}
	}
}

// asked reports whether a pod is shown. name is a part of its name, or the beginning of its id.
func asked(l timeline.Line, name, namespace, state string) bool {
	its, own, _ := strings.Cut(l.Name, "/")
	return (namespace == "" || its == namespace) && (state == "" || l.State == state) &&
		(name == "" || strings.Contains(own, name) || strings.HasPrefix(l.Name, name) || strings.HasPrefix(l.ID, name))
}

func (c call) showPods(output io.Writer, form string, now, earlier *timeline.Glance) error {
	switch form {
	case "json":
		return writeJSON(output, now)
	case "yaml":
		return writeYAML(output, now)
	}
	style := styleOf(output)
	style.Wide = c.has("wide")
	if c.has("watch") && style.Height > 0 {
		fmt.Fprint(output, "\x1b[H\x1b[J") // the whole screen anew
	} else {
		style.Height = 0
	}
	return now.Table(output, earlier, style)
}

func styleOf(output io.Writer) (style timeline.Style) {
	if file, ok := output.(*os.File); ok && term.IsTerminal(int(file.Fd())) {
		style.Color = os.Getenv("NO_COLOR") == ""
		style.Width, style.Height, _ = term.GetSize(int(file.Fd())) // without limits if it has none
	}
	return style
}

func timelineCommand(ctx context.Context, arguments []string, output io.Writer) error {
	c, err := look(ctx, "timeline", arguments)
	if err != nil {
		return err
	}
	since, sinceErr := time.ParseDuration(cmp.Or(c.text("since"), "0s"))
	slowest, slowestErr := strconv.Atoi(cmp.Or(c.text("slowest"), "0"))
	switch {
	case len(c.words) > 1:
		return misused("name one pod, id or container, not %q", c.words)
	case sinceErr != nil || since < 0:
		return misused("--since %s is not in the past: --since 10m is the last ten minutes", c.text("since"))
	case slowestErr != nil || slowest < 0:
		return misused("--slowest %s: it is the number of pods to show", c.text("slowest"))
	}
	wanted := strings.Join(c.words, "")
	pods, err := findTimelines(ctx, c.Config, wanted)
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
	style := styleOf(output)
	switch {
	case wanted != "" && len(pods) == 0:
		return fmt.Errorf("%q is there, and it is not what --failed or --since ask for", wanted)
	case c.has("json"):
		return writeJSON(output, append([]timeline.Pod{}, pods...)) // not null for none
	case wanted == "":
		return timeline.List(output, pods, time.Now(), style)
	}
	if err := pods[0].Text(output, style); err != nil || len(pods) == 1 {
		return err
	}
	fmt.Fprintf(output, "\nMore of this name, by id:\n")
	return timeline.List(output, pods[1:], time.Now(), style)
}

// findTimelines asks the daemon. If none runs, or it does not answer, it reads the daemon's files.
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
