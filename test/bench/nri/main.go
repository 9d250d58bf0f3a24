// Command nri measures what NRI costs: three daemons side by side run the same pods in
// turn. One is of the last commit that had no NRI, one has it off, and one has it on,
// with an idle plugin that wants pods.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
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
	rounds := flag.Int("rounds", 100, "pods of each daemon that are timed")
	earlier := flag.String("before", "", "directory of minicri and minicri-shim without NRI, see hack/before")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	err := run(ctx, *earlier, *rounds)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench-nri:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, earlier string, rounds int) (err error) {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	binaries := filepath.Dir(filepath.Dir(self))
	before, err := node.StartEarlier(ctx, earlier)
	if err != nil {
		return fmt.Errorf("the daemon of before: %w", err)
	}
	defer func() { err = errors.Join(err, before.Close()) }()
	off, err := node.Start(ctx, binaries)
	if err != nil {
		return err
	}
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
	plugin, err := connect(ctx, on.Config.NRI.Socket)
	if err != nil {
		return err
	}
	defer plugin.Stop()
	return compare(ctx, before, off, on, rounds)
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
	s, err := stub.New(p, stub.WithSocketPath(socket), stub.WithPluginName("idle"), stub.WithPluginIdx("10"))
	if err != nil {
		return nil, err
	}
	if err := s.Start(ctx); err != nil {
		return nil, err
	}
	<-p.synchronized
	return s, nil
}

// The goals: mostOff is the ratio of NRI off to none, mostCall what an idle plugin
// costs a hooked call in milliseconds, mostMemory what it costs the daemon in MiB.
const (
	mostOff    = 1.02
	mostCall   = 3
	mostMemory = 6
)

func compare(ctx context.Context, before, off, on *node.Node, rounds int) error {
	took, err := measure(ctx, []*node.Node{before, off, on}, rounds)
	if err != nil {
		return err
	}
	none, without, with := median(took[before]), median(took[off]), median(took[on])
	fmt.Printf("%d pods of the host's network in turn, medians of run + stop + remove:\n", rounds)
	fmt.Printf("the commit before NRI  %8.2f ms\n", milliseconds(none))
	ratio := float64(without) / float64(none)
	fmt.Printf("NRI off                %8.2f ms: ratio %.2f (to reach <= %g) %s\n", milliseconds(without), ratio, mostOff, reached(ratio, mostOff))
	call := milliseconds(with-without) / calls
	fmt.Printf("NRI on, an idle plugin %8.2f ms: %.2f ms for each of %d hooked calls (to reach <= %d) %s\n", milliseconds(with), call, calls, mostCall, reached(call, mostCall))
	less, err := contender.PSS(off.PID())
	if err != nil {
		return err
	}
	more, err := contender.PSS(on.PID())
	if err != nil {
		return err
	}
	memory := mebibytes(more) - mebibytes(less)
	fmt.Printf("memory of the daemon   %8.2f MiB off, %.2f MiB on: %+.2f MiB (PSS, to reach <= +%d) %s\n", mebibytes(less), mebibytes(more), memory, mostMemory, reached(memory, mostMemory))
	return nil
}

func reached(is, most float64) string {
	if is <= most {
		return "✓"
	}
	return "✗"
}

// measure times pods of the nodes, each time in another order.
func measure(ctx context.Context, nodes []*node.Node, rounds int) (map[*node.Node][]time.Duration, error) {
	const warmUp = 5
	took := make(map[*node.Node][]time.Duration)
	for round := range warmUp + rounds {
		for i := range nodes {
			n := nodes[(round+i)%len(nodes)]
			began := time.Now()
			if err := pod(ctx, n, fmt.Sprintf("pod-%d", round)); err != nil {
				return nil, err
			}
			if round >= warmUp {
				took[n] = append(took[n], time.Since(began))
			}
		}
	}
	return took, nil
}

func pod(ctx context.Context, n *node.Node, name string) error {
	answer, err := n.Client.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: n.Pod(name, runtimeapi.NamespaceMode_NODE)})
	if err != nil {
		return err
	}
	if _, err := n.Client.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: answer.GetPodSandboxId()}); err != nil {
		return err
	}
	_, err = n.Client.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: answer.GetPodSandboxId()})
	return err
}

func median(all []time.Duration) time.Duration {
	slices.Sort(all)
	return all[len(all)/2]
}

func mebibytes(kib int) float64 { return float64(kib) / 1024 }

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
