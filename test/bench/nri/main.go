// Command nri measures what NRI costs: two daemons side by side run the same pods in
// turn. One has it off, and one has it on, with an idle plugin that wants pods.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/test/bench/contender"
	"github.com/minicri/minicri/test/bench/node"
)

// calls are the hooked ones of a pod: Run, Stop and Remove.
const calls = 3

func main() {
	rounds := flag.Int("rounds", 100, "rounds that are timed")
	flag.Parse()
	contender.Main("nri", func(ctx context.Context) error { return run(ctx, *rounds) })
}

func run(ctx context.Context, rounds int) (err error) {
	self := contender.Must(os.Executable())
	binaries := filepath.Dir(filepath.Dir(self))
	off := contender.Must(node.Start(ctx, binaries))
	defer func() { err = errors.Join(err, off.Close()) }()
	on, err := node.StartWith(ctx, binaries, func(c *config.Config) {
		dir := filepath.Dir(c.Socket)
		c.NRI.Enabled = true
		c.NRI.Socket, c.NRI.PluginDir, c.NRI.ConfigDir = filepath.Join(dir, "nri"), filepath.Join(dir, "plugins"), filepath.Join(dir, "plugins")
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, on.Close()) }()
	plugin := contender.Must(connect(ctx, on.Config.NRI.Socket))
	defer plugin.Stop()
	return compare(ctx, off, on, rounds)
}

// idle is a plugin that wants pods and does nothing.
type idle struct{ synchronized chan struct{} }

func (p idle) Synchronize(context.Context, []*api.PodSandbox, []*api.Container) ([]*api.ContainerUpdate, error) {
	close(p.synchronized)
	return nil, nil
}
func (idle) RunPodSandbox(context.Context, *api.PodSandbox) error    { return nil }
func (idle) StopPodSandbox(context.Context, *api.PodSandbox) error   { return nil }
func (idle) RemovePodSandbox(context.Context, *api.PodSandbox) error { return nil }

func connect(ctx context.Context, socket string) (stub.Stub, error) {
	p := idle{make(chan struct{})}
	s := contender.Must(stub.New(p, stub.WithSocketPath(socket), stub.WithPluginName("idle"), stub.WithPluginIdx("10")))
	contender.Check(s.Start(ctx))
	<-p.synchronized
	return s, nil
}

// The goals: mostCall is what an idle plugin costs a hooked call in milliseconds,
// mostMemory what it costs the daemon in MiB.
const (
	mostCall   = 3
	mostMemory = 6
)

func compare(ctx context.Context, off, on *node.Node, rounds int) error {
	all := contender.Must(measure(ctx, off, on, rounds))
	fmt.Printf("%d rounds of pods of the host's network, A B B A of the two daemons in each; run + stop + remove, medians:\n", rounds)
	fmt.Printf("NRI off                %8.2f ms\n", milliseconds(median(all.all(quad.ofA))))
	fmt.Printf("  noise                %8.3f: NRI off to itself, the outer pods of a round; half of them %s\n", median(all.all(quad.noise)), spread(all.all(quad.noise)))
	call := median(all.all(quad.difference)) / calls
	fmt.Printf("NRI on, an idle plugin %8.2f ms: %.2f ms for each of %d hooked calls (to reach <= %d) %s\n", milliseconds(median(all.all(quad.ofB))), milliseconds(call), calls, mostCall, reached(milliseconds(call), mostCall))
	less := contender.Must(contender.Memory(off.PID()))
	more := contender.Must(contender.Memory(on.PID()))
	memory := mebibytes(more) - mebibytes(less)
	fmt.Printf("memory of the daemon   %8.2f MiB off, %.2f MiB on: %+.2f MiB (to reach <= +%d) %s\n", mebibytes(less), mebibytes(more), memory, mostMemory, reached(memory, mostMemory))
	return nil
}

func reached(is, most float64) string {
	if is <= most {
		return "✓"
	}
	return "✗"
}

// quad are the times of a round, in nanoseconds: one pod of daemon A, two of B, one of
// A. What grows or shrinks evenly meanwhile, the load above all, is in both alike.
type quad struct{ a1, b1, b2, a2 float64 }

func (q quad) ofA() float64        { return (q.a1 + q.a2) / 2 }
func (q quad) ofB() float64        { return (q.b1 + q.b2) / 2 }
func (q quad) difference() float64 { return q.ofB() - q.ofA() }

// noise would be 1 if there were none.
func (q quad) noise() float64 { return q.a2 / q.a1 }

type quads []quad

func (qs quads) all(of func(quad) float64) (values []float64) {
	for _, q := range qs {
		values = append(values, of(q))
	}
	return values
}

// measure compares the daemon that has it on with the one that has it off.
func measure(ctx context.Context, off, on *node.Node, rounds int) (all quads, err error) {
	const warmUp = 5
	for round := range warmUp + rounds {
		q := contender.Must(timed(ctx, off, on, round))
		if round >= warmUp {
			all = append(all, q)
		}
	}
	return all, nil
}

func timed(ctx context.Context, a, b *node.Node, round int) (q quad, err error) {
	for _, step := range []struct {
		of   *node.Node
		took *float64
	}{{a, &q.a1}, {b, &q.b1}, {b, &q.b2}, {a, &q.a2}} {
		began := time.Now()
		contender.Check(pod(ctx, step.of, fmt.Sprintf("pod-%d", round)))
		*step.took = float64(time.Since(began))
	}
	return q, nil
}

func pod(ctx context.Context, n *node.Node, name string) error {
	answer := contender.Must(n.Client.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: n.Pod(name, runtimeapi.NamespaceMode_NODE)}))
	contender.Must(n.Client.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: answer.GetPodSandboxId()}))
	_, err := n.Client.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: answer.GetPodSandboxId()})
	return err
}

func median(all []float64) float64 { return quantile(all, 0.5) }

// spread are the bounds of the middle half.
func spread(all []float64) string {
	return fmt.Sprintf("%.3f to %.3f", quantile(all, 0.25), quantile(all, 0.75))
}

func quantile(all []float64, part float64) float64 {
	sorted := slices.Sorted(slices.Values(all))
	return sorted[int(part*float64(len(sorted)))]
}

func mebibytes(kib int) float64 { return float64(kib) / 1024 }

func milliseconds(nanoseconds float64) float64 { return nanoseconds / float64(time.Millisecond) }
