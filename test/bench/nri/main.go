// Command nri measures what NRI costs: two daemons side by side, one without NRI
// and one with an idle plugin that wants every event, run the same pods in turn.
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
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	err := run(ctx, *rounds)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench-nri:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, rounds int) (err error) {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	binaries := filepath.Dir(filepath.Dir(self))
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

func compare(ctx context.Context, off, on *node.Node, rounds int) error {
	const warmUp = 5
	took := make(map[*node.Node][]time.Duration)
	for i := range warmUp + rounds {
		for _, n := range []*node.Node{off, on} {
			began := time.Now()
			if err := pod(ctx, n, fmt.Sprintf("pod-%d", i)); err != nil {
				return err
			}
			if i >= warmUp {
				took[n] = append(took[n], time.Since(began))
			}
		}
	}
	without, with := median(took[off]), median(took[on])
	fmt.Printf("%d pods of the host's network in turn, medians of run + stop + remove:\n", rounds)
	fmt.Printf("NRI off                %8.2f ms\n", milliseconds(without))
	fmt.Printf("NRI on, an idle plugin %8.2f ms: %.2f ms for each of %d hooked calls\n", milliseconds(with), milliseconds(with-without)/calls, calls)
	less, err := contender.PSS(off.PID())
	if err != nil {
		return err
	}
	more, err := contender.PSS(on.PID())
	if err != nil {
		return err
	}
	fmt.Printf("memory of the daemon   %8.2f MiB off, %.2f MiB on: %+.2f MiB (PSS)\n", mebibytes(less), mebibytes(more), mebibytes(more)-mebibytes(less))
	return nil
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
