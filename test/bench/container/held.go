package main

import (
	"context"
	"fmt"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/bench/contender"
)

const (
	// settle is how long idle processes have to give memory back.
	settle = 10 * time.Second
	// lists and statsLists are how often each is asked for.
	lists, statsLists = 200, 40
)

// held weighs pods that have one container, and asks for lists of many.
func (c *comparison) held(ctx context.Context) {
	var pods [2][]*contender.Pod
	for i, n := range c.nodes {
		pods[i] = make([]*contender.Pod, c.pods)
		contender.Parallel(c.pods, func(k int) {
			pods[i][k] = n.RunPod(ctx, fmt.Sprintf("held%d", k))
			pods[i][k].Run(ctx, "app0")
		})
	}
	time.Sleep(settle)
	c.weigh()
	for i := range c.nodes {
		contender.Parallel(c.containers-c.pods, func(k int) { pods[i][k%c.pods].Run(ctx, fmt.Sprintf("app%d", 1+k/c.pods)) })
	}
	c.list(ctx, pods)
}

func (c *comparison) weigh() {
	var owners [2]contender.Owners
	for i, n := range c.nodes {
		owners[i] = n.Owners()
		shims, pauses := owners[i].Shims.Processes, owners[i].Pauses.Processes
		// One supervisor has all pods of minicri; it may have a starter beside it.
		if want := [2]int{1, c.pods}[i]; shims < want || pauses != c.pods {
			contender.Check(fmt.Errorf("%s: %d pods have %d shims, want %d, and %d pause processes", n.Name, c.pods, shims, want, pauses))
		}
	}
	a := func(o contender.Owners) float64 { return (o.Shims.MiB() + o.Pauses.MiB()) / float64(c.pods) }
	supervisor := fmt.Sprintf("supervisor of %d pods with one container, starter included, MiB", c.pods)
	c.add(
		contender.Row{What: "memory of a pod with one container, shim and pause, MiB", MostOfOurs: 0.5, Ours: a(owners[0]), Theirs: a(owners[1])},
		contender.Row{What: supervisor, Ours: owners[0].Shims.MiB(), MostOfOurs: 25},
	)
}

// list times the status, which is what the kubelet asks most, and lists of containers, and
// weighs lists of their stats.
func (c *comparison) list(ctx context.Context, pods [2][]*contender.Pod) {
	var status, list, stats contender.Sample
	contender.Alternate(lists, func(round, i int) {
		id := pods[i][round%c.pods].ID
		status.Time(i, func() {
			contender.Must(c.nodes[i].CRI.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id}))
		})
	})
	contender.Alternate(lists, func(_, i int) {
		list.Time(i, func() {
			c.count(i, len(contender.Must(c.nodes[i].CRI.ListContainers(ctx, &runtimeapi.ListContainersRequest{})).GetContainers()))
		})
	})
	for i, n := range c.nodes { // often enough for the CPU time to be told
		before := n.CPU(false)
		for range statsLists {
			c.count(i, len(contender.Must(n.CRI.ListContainerStats(ctx, &runtimeapi.ListContainerStatsRequest{})).GetStats()))
		}
		stats[i] = []time.Duration{(n.CPU(false) - before) / statsLists}
	}
	c.add(
		contender.Row{What: "PodSandboxStatus, p50 ms", AtMost: 0.9}.Medians(status),
		contender.Row{What: "ListContainers, p50 ms", MostOfOurs: 3}.Medians(list),
		contender.Row{What: "ListContainerStats, ms of CPU", MostOfOurs: 50}.Medians(stats),
	)
}

func (c *comparison) count(node, listed int) {
	if listed != c.containers {
		contender.Check(fmt.Errorf("%s lists %d containers", c.nodes[node].Name, listed))
	}
}
