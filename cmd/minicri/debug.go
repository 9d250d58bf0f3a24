package main

import (
	"context"
	"flag"
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
	var force bool
	l, words, err := look(arguments, func(set *flag.FlagSet) { set.BoolVar(&force, "force", false, "") })
	if err != nil {
		return err
	}
	if len(words) != 2 || words[0] != "bundle" {
		return misused("usage: minicri debug bundle FILE.tar.gz")
	}
	err = writeFile(words[1], force, func(file io.Writer) error {
		bundle := inspect.NewBundle(file)
		collect(ctx, l, bundle)
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
	bundle.Text("version.txt", func() (string, error) { return "minicri " + version + "\n", nil })
	bundle.JSON("config.json", func() (any, error) { return c, nil })
	bundle.Text("config-sources.txt", func() (string, error) {
		var b strings.Builder
		return b.String(), showConfig(&b, l, nil)
	})
	client := inspect.NewClient(inspect.DebugSocket(c.State))
	everything := ctx
	ctx, cancel := context.WithTimeout(ctx, daemonLimit)
	defer cancel()
	bundle.JSON("timelines.json", func() (any, error) { return findTimelines(ctx, c, "") })
	bundle.JSON("pods.json", func() (any, error) { return client.Glance(ctx) })
	for name, path := range map[string]string{"goroutines.txt": "/goroutines", "heap.pprof": "/debug/pprof/heap", "metrics.txt": "/metrics"} {
		bundle.File(name, func() ([]byte, error) { return client.Read(ctx, path) })
	}
	addLogs(bundle, c.State)
	bundle.JSON("check.json", func() (any, error) { return examine(everything, l, nil) })
	bundle.Networks("networks", c.CNIConf)
	for _, path := range c.CNIConfDirs() {
		bundle.Networks("networks-of-handlers"+path, path)
	}
	bundle.Machine(everything)
}

// addLogs adds what supervisors have logged last.
func addLogs(bundle *inspect.Bundle, state string) {
	logs, _ := filepath.Glob(filepath.Join(state, "shims", "*", client.Log)) // the pattern is fine
	for _, path := range logs {
		bundle.File("supervisors/"+filepath.Base(filepath.Dir(path))+".log", func() ([]byte, error) { return client.TailOfLog(path) })
	}
}
