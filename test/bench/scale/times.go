package main

import (
	"context"
	"fmt"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/bench/contender"
)

// times are what operations took with many pods beside them.
type times struct {
	run, hostRun, createStart, stop            []time.Duration
	pods, containers, containerStats, podStats []time.Duration
}

// all is in the order of the table.
func (t *times) all() [][]time.Duration {
	return [][]time.Duration{t.run, t.hostRun, t.createStart, t.stop, t.pods, t.containers, t.containerStats, t.podStats}
}

func (t *times) measure(ctx context.Context, n *contender.Node, mark, samples int) error {
	for i := range samples {
		contender.Check(t.live(ctx, n, fmt.Sprintf("sample%d-%d", mark, i)))
		contender.Check(t.host(ctx, n, fmt.Sprintf("host%d-%d", mark, i)))
		contender.Check(t.list(ctx, n, mark))
	}
	return nil
}

// live is one pod's life.
func (t *times) live(ctx context.Context, n *contender.Node, name string) (err error) {
	var pod *contender.Pod
	if err = contender.Timed(&t.run, func() error { pod, err = n.RunPod(ctx, name); return err }); err != nil {
		return err
	}
	err = contender.Timed(&t.createStart, func() error { _, err := pod.Run(ctx, "app", contender.App); return err })
	if err != nil {
		return err
	}
	contender.Check(contender.Timed(&t.stop, func() error {
		_, err := n.CRI.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: pod.ID})
		return err
	}))
	return n.RemovePod(ctx, pod.ID)
}

// host is the start of a pod in the node's network, which runs no plugin.
func (t *times) host(ctx context.Context, n *contender.Node, name string) error {
	id := ""
	contender.Check(contender.Timed(&t.hostRun, func() (err error) {
		id, err = n.RunHostPod(ctx, name)
		return err
	}))
	return n.RemovePod(ctx, id)
}

func (t *times) list(ctx context.Context, n *contender.Node, mark int) error {
	for _, of := range []struct {
		to   *[]time.Duration
		list func() (int, error)
	}{
		{&t.pods, func() (int, error) {
			answer, err := n.CRI.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
			return len(answer.GetItems()), err
		}},
		{&t.containers, func() (int, error) {
			answer, err := n.CRI.ListContainers(ctx, &runtimeapi.ListContainersRequest{})
			return len(answer.GetContainers()), err
		}},
		{&t.containerStats, func() (int, error) {
			answer, err := n.CRI.ListContainerStats(ctx, &runtimeapi.ListContainerStatsRequest{})
			return len(answer.GetStats()), err
		}},
		{&t.podStats, func() (int, error) {
			answer, err := n.CRI.ListPodSandboxStats(ctx, &runtimeapi.ListPodSandboxStatsRequest{})
			return len(answer.GetStats()), err
		}},
	} {
		contender.Check(contender.Timed(of.to, func() error {
			count, err := of.list()
			if err == nil && count != mark {
				err = fmt.Errorf("%d are listed", count)
			}
			return err
		}))
	}
	return nil
}
