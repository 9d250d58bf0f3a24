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
func (c *comparison) held(ctx context.Context) error {
	var pods [2][]*contender.Pod
	for i, n := range c.nodes {
		pods[i] = make([]*contender.Pod, c.pods)
		contender.Check(contender.Parallel(c.pods, func(k int) (err error) {
			if pods[i][k], err = n.RunPod(ctx, fmt.Sprintf("held%d", k)); err == nil {
				_, err = pods[i][k].Run(ctx, "app0", contender.App)
			}
			return err
		}))
	}
	time.Sleep(settle)
	contender.Check(c.weigh())
	for i := range c.nodes {
		contender.Check(c.fill(ctx, pods[i]))
	}
	return c.list(ctx, pods)
}

// fill adds containers to pods until there are as many as are to be held.
func (c *comparison) fill(ctx context.Context, pods []*contender.Pod) error {
	return contender.Parallel(c.containers-len(pods), func(k int) error {
		_, err := pods[k%len(pods)].Run(ctx, fmt.Sprintf("app%d", 1+k/len(pods)), contender.App)
		return err
	})
}

func (c *comparison) weigh() error {
	row := contender.Row{What: "memory of a pod with one container, shim and pause, MiB", MostOfOurs: 0.5}
	numbers, ours := [2]*float64{&row.Ours, &row.Theirs}, 0.0
	for i, n := range c.nodes {
		o := contender.Must(n.Owners())
		shims, pauses := o.Shims.Processes, o.Pauses.Processes
		if want := map[string]int{contender.Minicri: 1, contender.Containerd: c.pods}[n.Name]; shims < want || pauses != c.pods { // minicri may have a starter beside it
			return fmt.Errorf("%s: %d pods have %d shims, want %d, and %d pause processes", n.Name, c.pods, shims, want, pauses)
		}
		*numbers[i] = mib(o.Shims.KiB+o.Pauses.KiB) / float64(c.pods)
		if i == 0 {
			ours = mib(o.Shims.KiB)
		}
	}
	c.add(row)
	what := fmt.Sprintf("supervisor of %d pods with one container, starter included, MiB", c.pods)
	c.add(contender.Row{What: what, Ours: ours, MostOfOurs: 25})
	return nil
}

func mib(kib int) float64 { return float64(kib) / 1024 }

// list times lists of containers, and weighs lists of their stats.
func (c *comparison) list(ctx context.Context, pods [2][]*contender.Pod) error {
	var took, used [2][]time.Duration
	contender.Check(c.status(ctx, pods))
	contender.Check(contender.Alternate(lists, func(_, i int) error {
		return contender.Timed(&took[i], func() error {
			answer, err := c.nodes[i].CRI.ListContainers(ctx, &runtimeapi.ListContainersRequest{})
			return c.counted(i, len(answer.GetContainers()), err)
		})
	}))
	for i := range c.nodes {
		cpu := contender.Must(c.listStats(ctx, i))
		used[i] = append(used[i], cpu)
	}
	c.add(contender.Row{What: "ListContainers, p50 ms", MostOfOurs: 3}.Medians(took))
	c.add(contender.Row{What: "ListContainerStats, ms of CPU", MostOfOurs: 50}.Costs(used, statsLists))
	return nil
}

// status times the question that the kubelet asks most.
func (c *comparison) status(ctx context.Context, pods [2][]*contender.Pod) error {
	var took [2][]time.Duration
	err := contender.Alternate(lists, func(round, i int) error {
		return contender.Timed(&took[i], func() error {
			_, err := c.nodes[i].CRI.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: pods[i][round%len(pods[i])].ID})
			return err
		})
	})
	c.add(contender.Row{What: "PodSandboxStatus, p50 ms", AtMost: 0.9}.Medians(took))
	return err
}

// listStats lists stats often enough for the CPU time to be told.
func (c *comparison) listStats(ctx context.Context, i int) (time.Duration, error) {
	before := contender.Must(c.nodes[i].CPU())
	for range statsLists {
		answer, err := c.nodes[i].CRI.ListContainerStats(ctx, &runtimeapi.ListContainerStatsRequest{})
		contender.Check(c.counted(i, len(answer.GetStats()), err))
	}
	after, err := c.nodes[i].CPU()
	return after - before, err
}

func (c *comparison) counted(node, count int, err error) error {
	if err == nil && count != c.containers {
		err = fmt.Errorf("%s lists %d containers", c.nodes[node].Name, count)
	}
	return err
}
