package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/term"

	"github.com/minicri/minicri/internal/inspect"
	"github.com/minicri/minicri/internal/timeline"
)

// podsFlags are those of `minicri pods`.
type podsFlags struct {
	watch, wide, asJSON      bool
	output, namespace, state string
	// name is a part of the names, or the beginning of the ids, that are shown.
	name string
}

// podsCommand is `minicri pods`: the node at a glance.
func podsCommand(ctx context.Context, arguments []string, output io.Writer) error {
	var f podsFlags
	c, words, err := look(arguments, func(set *flag.FlagSet) {
		set.BoolVar(&f.watch, "watch", false, "")
		set.BoolVar(&f.wide, "wide", false, "")
		set.BoolVar(&f.asJSON, "json", false, "")
		set.StringVar(&f.output, "o", "table", "")
		set.StringVar(&f.namespace, "n", "", "")
		set.StringVar(&f.state, "phase", "", "")
	})
	if err != nil {
		return err
	}
	if f.asJSON {
		f.output = "json"
	}
	if len(words) > 1 || !slices.Contains([]string{"table", "json", "yaml"}, f.output) {
		return misused("usage: minicri pods [POD] [-o table|json|yaml]")
	}
	if phases := []string{timeline.Ready, timeline.NotReady, timeline.Building}; f.state != "" && !slices.Contains(phases, f.state) {
		return misused("--phase %q: a pod is %q", f.state, phases)
	}
	f.name = strings.Join(words, "")
	client := inspect.NewClient(inspect.DebugSocket(c.State))
	var earlier *timeline.Glance
	for {
		now, err := client.Glance(ctx)
		if ctx.Err() != nil && f.watch {
			return nil
		}
		if err != nil {
			return fmt.Errorf("list the pods: %w", err)
		}
		now.Pods = slices.DeleteFunc(now.Pods, func(l timeline.Line) bool { return !f.shows(l) })
		if err := f.show(output, now, earlier); err != nil || !f.watch {
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

// watchPeriod is how often `minicri pods --watch` looks.
const watchPeriod = 2 * time.Second

func (f podsFlags) shows(l timeline.Line) bool {
	namespace, name, _ := strings.Cut(l.Name, "/")
	return (f.namespace == "" || namespace == f.namespace) && (f.state == "" || l.State == f.state) &&
		(f.name == "" || strings.Contains(name, f.name) || strings.HasPrefix(l.Name, f.name) || strings.HasPrefix(l.ID, f.name))
}

func (f podsFlags) show(output io.Writer, now, earlier *timeline.Glance) error {
	switch f.output {
	case "json":
		return writeJSON(output, now)
	case "yaml":
		return writeYAML(output, now)
	}
	style := styleOf(output)
	style.Wide = f.wide
	if f.watch && style.Height > 0 {
		fmt.Fprint(output, "\x1b[H\x1b[J") // the whole screen anew
	} else {
		style.Height = 0
	}
	return now.Table(output, earlier, style)
}

// styleOf is how lists are written: in colours and cut to its width on a terminal.
func styleOf(output io.Writer) (style timeline.Style) {
	if file, ok := output.(*os.File); ok && term.IsTerminal(int(file.Fd())) {
		style.Color = os.Getenv("NO_COLOR") == ""
		style.Width, style.Height, _ = term.GetSize(int(file.Fd())) // without limits if it has none
	}
	return style
}
