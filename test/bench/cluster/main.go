// Command cluster compares minicri with Debian's containerd under the same kubelet: for each a cluster of one node is
// made by hack/cluster, the same pods are applied, and what is seen by a watch of the API server is printed side by
// side, with the ratio of minicri to containerd. minicri is measured a second time below a kubelet with evented PLEG,
// which Debian's containerd has no events for.
package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/minicri/minicri/test/bench/contender"
)

// measured are a runtime under a kubelet with feature gates, in this order; they are compared with the last.
var measured = [3]struct{ name, runtime, gates string }{
	{"minicri", "minicri", ""},
	{"evented", "minicri", "EventedPLEG=true"},
	{"containerd", "containerd", ""},
}

func main() {
	contender.Main("cluster", func(ctx context.Context, dir string) {
		var results [len(measured)]map[string]float64
		for i, m := range measured {
			fmt.Fprintln(os.Stderr, "bench-cluster:", m.name)
			results[i] = measure(ctx, filepath.Join(dir, m.name), "bench-"+m.name, m.runtime, m.gates)
		}
		fmt.Printf("%-58s %12s %12s %12s %18s %18s\n", "", measured[0].name, measured[1].name, measured[2].name, "minicri/cont", "evented/cont")
		for _, row := range rows {
			ours, evented, theirs := results[0][row], results[1][row], results[2][row]
			fmt.Printf("%-58s %12.2f %12.2f %12.2f %18.2f %18.2f\n", row, ours, evented, theirs, ours/theirs, evented/theirs)
		}
	})
}

// measure makes a cluster, measures, and takes it down.
func measure(ctx context.Context, socket, name, runtime, gates string) map[string]float64 {
	cluster := func(arguments ...string) error {
		command := exec.Command("bin/cluster", append([]string{"--name", name}, arguments...)...)
		command.Stdout, command.Stderr = os.Stderr, os.Stderr
		return command.Run()
	}
	up := []string{"up", "--nodes", "1", "--runtime", runtime}
	if gates != "" {
		up = append(up, "--kubelet-gates", gates)
	}
	contender.Check(cluster(up...))
	defer contender.Finally(func() error { return cluster("down") })
	b := &bench{cluster: name, results: make(map[string]float64)}
	defer b.connect(socket)()
	for _, measure := range []func(context.Context){b.single, b.twenty, b.sixty, b.idle, b.job} {
		measure(ctx)
		time.Sleep(2 * time.Second) // what the last one left to do
	}
	return b.results
}
