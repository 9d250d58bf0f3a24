// Command cluster compares minicri with Debian's containerd under the same
// kubelet: for each a cluster of one node is made by hack/cluster, the same pods
// are applied, and what is seen by a watch of the API server is printed side by
// side, with the ratio of minicri to containerd. minicri is measured a second time
// below a kubelet with evented PLEG, which Debian's containerd has no events for.
package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	cost "github.com/minicri/minicri/test/bench/contender"
)

func main() { cost.Main("cluster", run) }

// contender is a runtime under a kubelet with feature gates.
type contender struct{ name, runtime, gates string }

// contenders are measured in this order, and compared with the last.
var contenders = []contender{
	{"minicri", "minicri", ""},
	{"evented", "minicri", "EventedPLEG=true"},
	{"containerd", "containerd", ""},
}

func run(ctx context.Context) error {
	var results []map[string]float64
	for _, c := range contenders {
		measured, err := c.measure(ctx)
		if err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		results = append(results, measured)
	}
	last := len(contenders) - 1
	head, ratios := fmt.Sprintf("%-58s", ""), ""
	for i, c := range contenders {
		head += fmt.Sprintf(" %12s", c.name)
		if i < last {
			ratios += fmt.Sprintf(" %18s", c.name+"/"+contenders[last].name[:4])
		}
	}
	fmt.Println(head + ratios)
	for _, row := range rows {
		line, ratios := fmt.Sprintf("%-58s", row), ""
		for i, result := range results {
			line += fmt.Sprintf(" %12.2f", result[row])
			if i < last {
				ratios += fmt.Sprintf(" %18.2f", result[row]/results[last][row])
			}
		}
		fmt.Println(line + ratios)
	}
	return nil
}

// measure makes a cluster, measures, and takes it down.
func (c contender) measure(ctx context.Context) (results map[string]float64, err error) {
	name := "bench-" + c.name
	tool := cost.Must(filepath.Abs("bin/cluster"))
	cluster := func(arguments ...string) error {
		command := exec.Command(tool, append([]string{"--name", name}, arguments...)...)
		command.Stdout, command.Stderr = os.Stderr, os.Stderr
		return command.Run()
	}
	up := []string{"up", "--nodes", "1", "--runtime", c.runtime}
	if c.gates != "" {
		up = append(up, "--kubelet-gates", c.gates)
	}
	cost.Check(cluster(up...))
	defer func() {
		if down := cluster("down"); err == nil {
			err = down
		}
	}()
	a := cost.Must(newAPI(ctx, name))
	defer a.close()
	b := &bench{api: a, results: make(map[string]float64), processes: processesOf(name)}
	for _, measure := range []func(context.Context) error{b.single, b.together(20, rowTwenty), b.together(60, rowSixty), b.idle, b.job} {
		cost.Check(measure(ctx))
		time.Sleep(2 * time.Second) // what the last one left to do
	}
	return b.results, nil
}
