package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"time"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/inspect"
	"github.com/minicri/minicri/supervisor/client"
)

// debugCommand is `minicri debug bundle FILE`: what a maintainer asks for.
func debugCommand(ctx context.Context, arguments []string, output io.Writer) error {
	l, err := look("debug", arguments)
	if err != nil {
		return err
	}
	words := l.words
	if len(words) != 2 || words[0] != "bundle" {
		return misused("usage: minicri debug bundle FILE.tar.gz")
	}
	err = writeFile(words[1], l.has("force"), func(file io.Writer) error {
		bundle := inspect.NewBundle(file)
		collect(ctx, l.Loaded, bundle)
		return bundle.Close()
	})
	if err != nil {
		return fmt.Errorf("write the bundle: %w", err)
	}
	_, err = fmt.Fprintf(output, "%s: look at it before you send it. Environments, secrets and credentials are left out; names of pods, images and addresses are in it.\n", words[1])
	return err
}

// daemonLimit is how long the daemon may take for all parts that it is asked for.
const daemonLimit = 30 * time.Second

// collect adds every part; in place of one that cannot be collected it adds the error.
func collect(ctx context.Context, l *config.Loaded, bundle *inspect.Bundle) {
	c := l.Config
	bundle.Add("version.txt", func() (any, error) { return "minicri " + version + "\n", nil })
	bundle.Add("config.json", func() (any, error) { return c, nil })
	bundle.Add("config-sources.txt", func() (any, error) {
		var b strings.Builder
		for _, v := range l.Values() { // their values are in config.json
			fmt.Fprintln(&b, v.Name, v.Source)
		}
		return b.String(), nil
	})
	daemon := inspect.NewClient(inspect.DebugSocket(c.State))
	limited, cancel := context.WithTimeout(ctx, daemonLimit)
	defer cancel()
	bundle.Add("timelines.json", func() (any, error) { return findTimelines(limited, c, "") })
	for name, path := range map[string]string{"goroutines.txt": "/goroutines", "heap.pprof": "/debug/pprof/heap", "metrics.txt": "/metrics"} {
		bundle.Add(name, func() (any, error) { return daemon.Read(limited, path) })
	}
	bundle.Add("pods.json", func() (any, error) {
		data, err := daemon.Read(limited, "/pods")
		return json.RawMessage(data), err
	})
	logs, _ := filepath.Glob(filepath.Join(c.State, "shims", "*", client.Log)) // the pattern is fine
	for _, path := range logs {                                                // what supervisors have logged last
		bundle.Add("supervisors/"+filepath.Base(filepath.Dir(path))+".log", func() (any, error) { return client.TailOfLog(path) })
	}
	bundle.Add("check.json", func() (any, error) { return examine(ctx, l, nil) })
	bundle.Networks("networks", c.CNIConf)
	for _, path := range c.CNIConfDirs() {
		bundle.Networks("networks-of-handlers"+path, path)
	}
	bundle.Machine(ctx)
}
