package main

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/test/bench/contender"
)

// rounds is how often each runtime has a burst.
const rounds = 3

// burst makes pods with a host port at once, with each limit in turn.
func burst(ctx context.Context, dir string, pods int) {
	var runtimes []contender.Runtime
	limits := []int{0, 2, 4, 8}
	for i, limit := range limits {
		config := fmt.Sprintf("limits.cni_at_once = %d\n", limit)
		runtimes = append(runtimes, contender.Runtime{Name: contender.Minicri, Config: config, Number: i})
	}
	runtimes = append(runtimes, contender.Runtime{Name: contender.Containerd, Number: len(limits)})
	contender.With(ctx, dir, runtimes, func(nodes []*contender.Node) {
		took := contender.Times{}
		for round := range 1 + rounds {
			if round == 1 {
				clear(took) // the first warms up
			}
			for i, n := range nodes {
				n.HostPort = int32(20000 + 1000*i)
				name := n.Name
				if i < len(limits) {
					name = fmt.Sprintf("%s, cni_at_once = %d", n.Name, limits[i])
				}
				one(ctx, n, name, pods, took)
			}
		}
		fmt.Printf("\n%d pods at once, %d times, medians in ms\n\n", pods, rounds)
		fmt.Printf("%-28s %10s %12s %12s %12s\n", "", "last ready", "median ready", "longest ADD", "all removed")
		for i, n := range nodes {
			name := n.Name
			if i < len(limits) {
				name = fmt.Sprintf("%s, cni_at_once = %d", n.Name, limits[i])
			}
			longest := "-"
			if took[name+" ADD"] != nil {
				longest = fmt.Sprintf("%.0f", took.P50(name+" ADD"))
			}
			fmt.Printf("%-28s %10.0f %12.0f %12s %12.0f\n", name,
				took.P50(name+" last"), took.P50(name+" median"), longest, took.P50(name+" removed"))
		}
	})
}

// one makes pods of a node at once and removes them.
func one(ctx context.Context, n *contender.Node, name string, pods int, took contender.Times) {
	var mu sync.Mutex
	var ids []string
	var ready []time.Duration
	began := time.Now()
	contender.Burst(pods, pods, func(i int) {
		id := n.RunPod(ctx, fmt.Sprintf("pod%d", i)).ID
		mu.Lock()
		defer mu.Unlock()
		ids, ready = append(ids, id), append(ready, time.Since(began))
	})
	took[name+" last"] = append(took[name+" last"], slices.Max(ready))
	took[name+" median"] = append(took[name+" median"], contender.Quantile(ready, 0.5))
	if n.Name == contender.Minicri {
		took[name+" ADD"] = append(took[name+" ADD"], longestADD(ctx, n, ids))
	}
	took.Time(name+" removed", func() { contender.Burst(pods, pods, func(i int) { n.RemovePod(ctx, ids[i]) }) })
}

// longestADD is the longest run of all plugins of one pod, from the timelines.
func longestADD(ctx context.Context, n *contender.Node, ids []string) (longest time.Duration) {
	for _, id := range ids {
		request := &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id, Verbose: true}
		answer := contender.Must(n.CRI.PodSandboxStatus(ctx, request))
		var info struct {
			Timeline []struct {
				Took   string
				Plugin *step.Plugin
			}
		}
		contender.Check(json.Unmarshal([]byte(answer.Info["info"]), &info))
		var plugins time.Duration
		for _, row := range info.Timeline {
			if row.Plugin != nil && row.Plugin.Verb == "ADD" {
				plugins += contender.Must(time.ParseDuration(row.Took))
			}
		}
		longest = max(longest, plugins)
	}
	return longest
}
