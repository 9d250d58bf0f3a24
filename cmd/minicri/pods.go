package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/inspect"
	"github.com/minicri/minicri/internal/manual"
	"github.com/minicri/minicri/internal/node"
	"github.com/minicri/minicri/internal/redact"
	"github.com/minicri/minicri/internal/timeline"
)

func podsCommand(cmd *cobra.Command, arguments []string) error {
	c, err := look(cmd)
	if err != nil {
		return err
	}
	state, err := stateNamed(c.text("phase"))
	if err != nil {
		return err
	}
	name, namespace := strings.Join(arguments, ""), c.text("namespace")
	daemon := inspect.NewClient(inspect.DebugSocket(c.State))
	var earlier *timeline.Glance
	return c.watch(cmd, func(ctx context.Context, style timeline.Style) error {
		now, err := daemon.Glance(ctx)
		if err != nil {
			return fmt.Errorf("list the pods: %w", err)
		}
		now.Pods = slices.DeleteFunc(now.Pods, func(l timeline.Line) bool { return !asked(l, name, namespace, state) })
		if name != "" && len(now.Pods) == 0 {
			return fmt.Errorf("no pod of the name or id %q: `minicri pods` lists all, `minicri timeline %s` shows a removed one", name, name)
		}
		style.Wide = c.has("wide")
		err = c.show(cmd, now, func(output io.Writer) error { return now.Table(output, earlier, style) })
		if c.has("watch") {
			earlier = now
		}
		return err
	})
}

// stateNamed returns the state of a pod for the words of the CRI, of kubectl and of the table.
func stateNamed(word string) (string, error) {
	letters := strings.NewReplacer(" ", "", "-", "", "_", "").Replace(strings.ToLower(word))
	state, known := map[string]string{
		"": "", "ready": timeline.Ready, "notready": timeline.NotReady, "creating": timeline.Building, "beingmade": timeline.Building,
	}[strings.TrimPrefix(letters, "sandbox")]
	if !known {
		return "", manual.Misused("--phase %q: the states of a pod are Ready, NotReady and Creating", word)
	}
	return state, nil
}

// asked reports whether a pod is shown. name is a part of its name, or the beginning of its id.
func asked(l timeline.Line, name, namespace, state string) bool {
	its, own, _ := strings.Cut(l.Name, "/")
	return (namespace == "" || its == namespace) && (state == "" || l.State == state) &&
		(name == "" || strings.Contains(own, name) || strings.HasPrefix(l.Name, name) || strings.HasPrefix(l.ID, name))
}

// watch calls draw once or, with --watch, until an interrupt, each time on a cleared screen if there is one.
func (c call) watch(cmd *cobra.Command, draw func(ctx context.Context, style timeline.Style) error) error {
	ctx, output := cmd.Context(), cmd.OutOrStdout()
	for {
		style := styleOf(output)
		if c.has("watch") && style.Height > 0 {
			fmt.Fprint(output, "\x1b[H\x1b[J")
		} else {
			style.Height = 0
		}
		err := draw(ctx, style)
		if c.has("watch") && ctx.Err() != nil {
			return nil
		}
		if err != nil || !c.has("watch") {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(watchPeriod):
		}
	}
}

// show prints a value in the form that the flags ask for. table prints it for people.
func (c call) show(cmd *cobra.Command, value any, table func(output io.Writer) error) error {
	form, err := c.form()
	switch {
	case err != nil:
		return err
	case form == "json":
		return writeJSON(cmd.OutOrStdout(), value)
	case form == "yaml":
		return writeYAML(cmd.OutOrStdout(), value)
	}
	return table(cmd.OutOrStdout())
}

func styleOf(output io.Writer) (style timeline.Style) {
	if file, ok := output.(*os.File); ok && term.IsTerminal(int(file.Fd())) {
		style.Color = os.Getenv("NO_COLOR") == ""
		style.Width, style.Height, _ = term.GetSize(int(file.Fd())) // without limits if it has none
	}
	return style
}

// findTimelines asks the daemon. If none runs, or it does not answer, it reads the daemon's files.
func findTimelines(ctx context.Context, c *config.Config, wanted string) ([]timeline.Pod, error) {
	pods, err := inspect.NewClient(inspect.DebugSocket(c.State)).Timelines(ctx, wanted)
	switch {
	case errors.Is(err, inspect.ErrNoAnswer):
		fmt.Fprintf(os.Stderr, "minicri: %s; the output is from its files\n", redact.Line(err.Error()))
	case !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ECONNREFUSED):
		return pods, err
	}
	identity, err := node.Read(c.Root)
	if err != nil {
		return nil, fmt.Errorf("no daemon answers at %s, and there are no files of one: %w", inspect.DebugSocket(c.State), err)
	}
	netns := func(id string) string { return filepath.Join(c.NetnsDir, identity.Mark()+id) }
	return inspect.Files{Root: c.Root, State: c.State, Netns: netns}.Timelines(wanted)
}

// namesOf returns the names that complete an argument. It is silent if the daemon does not answer.
func namesOf(cmd *cobra.Command, kind string) (names []string) {
	ctx, cancel := context.WithTimeout(context.Background(), dialLimit)
	defer cancel()
	c := config.Load(cmd.Flags())
	daemon := inspect.NewClient(inspect.DebugSocket(c.State))
	if kind == "images" {
		var all []inspect.Image
		_ = daemon.JSON(ctx, "/images", &all)
		for _, one := range all {
			names = append(names, one.Tags...)
		}
		return names
	}
	glance, err := daemon.Glance(ctx)
	if err != nil {
		return nil
	}
	for _, line := range glance.Pods {
		_, own, _ := strings.Cut(line.Name, "/")
		names = append(names, line.Name, own, line.ID[:min(12, len(line.ID))])
	}
	return names
}
