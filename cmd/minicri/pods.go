package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/minicri/minicri/internal/inspect"
	"github.com/minicri/minicri/internal/manual"
	"github.com/minicri/minicri/internal/timeline"
)

// podsCommand is `minicri pods`: the node at a glance.
func podsCommand(ctx context.Context, arguments []string, output io.Writer) error {
	var watch, wide, asJSON bool
	command := manual.Find("pods")
	help := command.FlagHelp
	c, words, err := look(arguments, func(set *flag.FlagSet) {
		set.BoolVar(&watch, "watch", false, help("watch"))
		set.BoolVar(&wide, "wide", false, help("wide"))
		set.BoolVar(&asJSON, "json", false, help("json"))
	})
	if err != nil {
		return err
	}
	if len(words) > 0 {
		return misused("minicri pods takes no argument: %q", words)
	}
	client := inspect.NewClient(inspect.DebugSocket(c.State))
	style := timeline.Style{Color: isTerminal(output) && os.Getenv("NO_COLOR") == ""}
	var earlier *timeline.Glance
	for {
		now, err := client.Glance(ctx)
		if ctx.Err() != nil && watch {
			return nil
		}
		if err != nil {
			return fmt.Errorf("list the pods: %w", err)
		}
		if asJSON {
			err = json.NewEncoder(printableJSON{output}).Encode(now)
		} else {
			if watch && style.Color {
				fmt.Fprint(output, "\x1b[H\x1b[J") // the whole screen anew
			}
			err = now.Table(output, earlier, style)
			if err == nil && wide {
				err = now.TableOfOlder(output, style)
			}
		}
		if err != nil || !watch {
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
