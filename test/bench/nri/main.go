// Command nri measures what NRI costs: two daemons side by side run the same pods in
// turn. One has it off, and one has it on, with an idle plugin that wants pods.
package main

import (
	"context"
	"flag"
	"fmt"
	"path/filepath"
	"time"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"

	"github.com/minicri/minicri/test/bench/contender"
)

const (
	// calls are the hooked ones of a pod: Run, Stop and Remove.
	calls = 3
	// warmUp rounds do not count.
	warmUp = 5
)

func main() {
	rounds := flag.Int("rounds", 100, "rounds that are timed")
	flag.Parse()
	contender.Main("nri", func(ctx context.Context, dir string) {
		off := contender.Start(ctx, filepath.Join(dir, "a"), contender.Runtime{Name: contender.Minicri})
		defer contender.Finally(off.Close)
		socket, plugins := filepath.Join(dir, "nri"), filepath.Join(dir, "plugins")
		config := fmt.Sprintf("[nri]\nenabled = true\nsocket = %q\nplugin_dir = %q\nconfig_dir = %q\n", socket, plugins, plugins)
		on := contender.Start(ctx, filepath.Join(dir, "b"), contender.Runtime{Name: contender.Minicri, Number: 1, Config: config})
		defer contender.Finally(on.Close)
		p := idle{make(chan struct{})}
		plugin := contender.Must(stub.New(p, stub.WithSocketPath(socket), stub.WithPluginName("idle"), stub.WithPluginIdx("10")))
		contender.Check(plugin.Start(ctx))
		defer plugin.Stop()
		<-p.synchronized
		compare(ctx, off, on, *rounds)
	})
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

// compare runs four pods in a round: one of the daemon that has it off, two of the other
// one, one of the first. What grows or shrinks evenly meanwhile, the load above all, is in
// both alike. The noise, of one daemon to itself, would be 1 if there were none.
func compare(ctx context.Context, off, on *contender.Node, rounds int) {
	var a, b, difference, noise []float64
	for round := range warmUp + rounds {
		var took [4]float64
		for i, n := range []*contender.Node{off, on, on, off} {
			began := time.Now()
			n.RemovePod(ctx, n.RunHostPod(ctx, fmt.Sprintf("pod-%d", round)).ID)
			took[i] = contender.Milliseconds(time.Since(began))
		}
		if round >= warmUp {
			a, b = append(a, (took[0]+took[3])/2), append(b, (took[1]+took[2])/2)
			difference, noise = append(difference, (took[1]+took[2]-took[0]-took[3])/2/calls), append(noise, took[3]/took[0])
		}
	}
	fmt.Printf("%d rounds of pods of the host's network; run + stop + remove, medians: %.2f ms with NRI off, %.2f ms with an idle plugin\n",
		rounds, contender.Quantile(a, 0.5), contender.Quantile(b, 0.5))
	fmt.Printf("noise, NRI off to itself: %.3f; half of the rounds %.3f to %.3f\n",
		contender.Quantile(noise, 0.5), contender.Quantile(noise, 0.25), contender.Quantile(noise, 0.75))
	memory := float64(contender.Memory(on.PID())-contender.Memory(off.PID())) / 1024
	contender.PrintTable(
		contender.Row{What: fmt.Sprintf("one of %d hooked calls, ms", calls), Ours: contender.Quantile(difference, 0.5), MostOfOurs: 3},
		contender.Row{What: "memory of the daemon, MiB more", Ours: memory, MostOfOurs: 6},
	)
}
