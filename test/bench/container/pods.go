package main

import (
	"context"
	"fmt"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/bench/contender"
)

// podTimes are how long the parts of pods' lives took, by the node.
type podTimes struct{ run, hostRun, stop [2][]time.Duration }

// emptyPods times pods without containers: in a network of their own, and in the node's,
// which takes no plugin.
func (c *comparison) emptyPods(ctx context.Context) error {
	took := &podTimes{}
	for _, timed := range []struct {
		rounds int
		to     *podTimes
	}{{warmUp, &podTimes{}}, {c.rounds, took}} {
		err := contender.Alternate(timed.rounds, func(round, i int) error { return timed.to.measure(ctx, i, c.nodes[i], round) })
		if err != nil {
			return err
		}
	}
	c.add(contender.Row{What: "Run, p50 ms"}.Medians(took.run))
	c.add(contender.Row{What: "Stop, p50 ms"}.Medians(took.stop))
	c.add(contender.Row{What: "host-network Run, p50 ms", MostOfOurs: 10}.Medians(took.hostRun))
	return nil
}

func (t *podTimes) measure(ctx context.Context, i int, n *contender.Node, round int) error {
	var pod *contender.Pod
	contender.Check(contender.Timed(&t.run[i], func() (err error) {
		pod, err = n.RunPod(ctx, fmt.Sprintf("pod%d", round))
		return err
	}))
	contender.Check(contender.Timed(&t.stop[i], func() error {
		_, err := n.CRI.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: pod.ID})
		return err
	}))
	contender.Check(n.RemovePod(ctx, pod.ID))
	host := ""
	contender.Check(contender.Timed(&t.hostRun[i], func() (err error) {
		host, err = n.RunHostPod(ctx, fmt.Sprintf("host%d", round))
		return err
	}))
	return n.RemovePod(ctx, host)
}
