// Command timeline measures what it costs to see a pod's life: RunPodSandbox with
// metrics served and every call traced, to a collector that answers and to one that
// hangs, beside the defaults, in turn; what the timeline of one pod costs the daemon;
// and how long `minicri timeline` takes with 1000 pods on the node, of its network,
// and 1000 lives that have ended.
package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/id"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/test/bench/contender"
	"github.com/minicri/minicri/test/bench/node"
)

const (
	rounds = 40
	warmUp = 4
	lives  = 1000
	pods   = 1000
	asked  = 20
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	err := run(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench-timeline:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) (err error) {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	binaries := filepath.Dir(filepath.Dir(self))
	answers, err := collector(func(http.ResponseWriter, *http.Request) {})
	if err != nil {
		return err
	}
	defer answers.Close()
	hangs, err := collector(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	if err != nil {
		return err
	}
	defer hangs.Close()
	ways := []*way{
		{name: "the defaults", change: func(*config.Config) {}},
		{name: "metrics and every call traced", change: traced(answers.Addr)},
		{name: "the same to a collector that hangs", change: traced(hangs.Addr)},
	}
	for _, w := range ways {
		if w.node, err = node.StartWith(ctx, binaries, w.change); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, w.node.Close()) }()
	}
	if err := compare(ctx, ways); err != nil {
		return err
	}
	if err := oneLife(); err != nil {
		return err
	}
	return ask(ctx, binaries, ways[0].node)
}

// collector serves OTLP over HTTP at a free port.
func collector(answer http.HandlerFunc) (*http.Server, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	server := &http.Server{Addr: listener.Addr().String(), Handler: answer, ReadHeaderTimeout: time.Second}
	go func() { _ = server.Serve(listener) }()
	return server, nil
}

// way is one configuration that is measured.
type way struct {
	name   string
	change func(*config.Config)
	node   *node.Node
	took   []time.Duration
}

// traced serves metrics and sends the spans of every call to a collector.
func traced(collector string) func(*config.Config) {
	return func(c *config.Config) {
		c.Metrics = "127.0.0.1:0"
		c.Tracing.Endpoint, c.Tracing.Protocol, c.Tracing.PerMillion = collector, "http", 1_000_000
	}
}

// compare runs pods in all ways, one after the other.
func compare(ctx context.Context, ways []*way) error {
	for i := range warmUp + rounds {
		for _, w := range ways {
			began := time.Now()
			pod, err := w.node.Client.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: w.node.Pod(fmt.Sprint("pod", i), runtimeapi.NamespaceMode_POD)})
			if err != nil {
				return err
			}
			if i >= warmUp {
				w.took = append(w.took, time.Since(began))
			}
			if _, err := w.node.Client.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: pod.GetPodSandboxId()}); err != nil {
				return err
			}
		}
	}
	off := contender.Quantile(ways[0].took, .5)
	for _, w := range ways {
		on := contender.Quantile(w.took, .5)
		fmt.Printf("RunPodSandbox, median of %d   %-35s %6.2f ms   ratio %.3f (goal 1.02)\n",
			rounds, w.name, contender.Milliseconds(on), float64(on)/float64(off))
	}
	return nil
}

// oneLife measures what the timeline of a pod costs, which cannot be turned off:
// twelve steps, three plugins, and a file at the end.
func oneLife() error {
	dir, err := os.MkdirTemp("", "minicri-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	kept, err := step.OpenLives(dir)
	if err != nil {
		return err
	}
	var record, keep []time.Duration
	var size int64
	for range lives {
		timeline := step.NewTimeline(nil)
		began := time.Now()
		steps := step.Begin(context.Background(), nil, timeline)
		for i := range 12 {
			steps.Step(step.Name(fmt.Sprint("pod/step", i)), func(ctx context.Context) error {
				if i < 3 {
					step.Record(ctx, step.Row{Kind: "plugin", Step: "bridge ADD", Start: time.Now(), Plugin: &step.Plugin{Name: "bridge", Verb: "ADD"}})
				}
				return nil
			})
		}
		record = append(record, time.Since(began))
		began = time.Now()
		if err := kept.Keep(step.Life{Kind: "pod", ID: id.New(), Name: "default/web", End: time.Now(), Rows: timeline.Rows()}); err != nil {
			return err
		}
		keep = append(keep, time.Since(began))
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if info, err := entry.Info(); err == nil {
			size += info.Sys().(*syscall.Stat_t).Blocks * 512
		}
	}
	fmt.Printf("One life                      steps and plugins recorded in %.1f µs, kept at its end in %.1f µs (medians); %d lives take %.1f MiB of disk (goal 8)\n",
		float64(contender.Quantile(record, .5))/1e3, float64(contender.Quantile(keep, .5))/1e3, len(entries), float64(size)/(1<<20))
	return nil
}

// ask measures `minicri timeline POD` with 1000 pods and 1000 lives on the node, of a
// pod that is there and of one that is gone.
func ask(ctx context.Context, binaries string, n *node.Node) (err error) {
	live := &crowd{client: n.Client}
	defer func() { err = errors.Join(err, live.remove()) }()
	began := time.Now()
	if err := live.run(ctx, pods, func(i int) *runtimeapi.PodSandboxConfig {
		return n.Pod(fmt.Sprint("live", i), runtimeapi.NamespaceMode_NODE)
	}); err != nil {
		return err
	}
	fmt.Printf("%d pods are there after %.0f s\n", pods, time.Since(began).Seconds())
	kept, err := step.OpenLives(filepath.Join(n.Config.Root, "lives"))
	if err != nil {
		return err
	}
	var rows []step.Row
	for i := range 20 {
		rows = append(rows, step.Row{Kind: "pod", Step: fmt.Sprint("step", i), Start: time.Now(), Took: time.Millisecond})
	}
	for i := range lives {
		if err := kept.Keep(step.Life{Kind: "pod", ID: id.New(), Name: fmt.Sprint("default/gone", i), End: time.Now(), Error: "no address", Rows: rows}); err != nil {
			return err
		}
	}
	pod, err := n.Client.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: n.Pod("here", runtimeapi.NamespaceMode_POD)})
	if err != nil {
		return err
	}
	return measure(ctx, binaries, n, "here", "live500", "gone500", pod.GetPodSandboxId()[:12])
}
