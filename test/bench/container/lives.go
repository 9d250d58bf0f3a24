package main

import (
	"context"
	"fmt"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/bench/contender"
)

const (
	// warmUp rounds do not count.
	warmUp = 2
	// execs are timed in each round.
	execs = 3
)

// times is how long the parts of containers' lives took, by the node.
type times struct {
	first  [2][]time.Duration // create and start, the first of its pod
	second [2][]time.Duration // create and start, beside another
	exec   [2][]time.Duration
	end    [2][]time.Duration // stop and remove
	remove [2][]time.Duration // of one that is stopped
	cpu    [2][]time.Duration // CPU time of all that
}

// lives times containers one by one, in pods of their own.
func (c *comparison) lives(ctx context.Context) error {
	contender.Check(c.live(ctx, warmUp, &times{}))
	took := &times{}
	contender.Check(c.live(ctx, c.rounds, took))
	first, further := 0.55, 0.5
	if c.runtime != "" {
		first, further = 0.7, 0.7 // both wait for the same runtime
	}
	c.add(contender.Row{What: "create + start, first of its pod, p50 ms", AtMost: first}.Medians(took.first))
	c.add(contender.Row{What: "p95 ms"}.Quantiles(took.first, 0.95))
	c.add(contender.Row{What: "create + start, a further one, p50 ms", AtMost: further}.Medians(took.second))
	c.add(contender.Row{What: "p95 ms"}.Quantiles(took.second, 0.95))
	c.add(contender.Row{What: "ExecSync of true, p50 ms", AtMost: 0.33}.Medians(took.exec))
	c.add(contender.Row{What: "stop + remove, p50 ms", AtMost: 0.1}.Medians(took.end))
	c.add(contender.Row{What: "remove of a stopped one, p50 ms", AtMost: 0.6}.Medians(took.remove))
	c.add(contender.Row{What: fmt.Sprintf("2 such lives with %d execs, p50 ms of CPU", execs)}.Medians(took.cpu))
	return nil
}

func (c *comparison) live(ctx context.Context, rounds int, to *times) error {
	return contender.Alternate(rounds, func(round, i int) error {
		pod := contender.Must(c.nodes[i].RunPod(ctx, fmt.Sprintf("life%d", round)))
		before := contender.Must(pod.Node.CPUWithChildren())
		contender.Check(to.measure(ctx, i, pod))
		after := contender.Must(pod.Node.CPUWithChildren())
		to.cpu[i] = append(to.cpu[i], after-before)
		return pod.Node.RemovePod(ctx, pod.ID)
	})
}

// measure times two containers of a pod of a node.
func (t *times) measure(ctx context.Context, node int, pod *contender.Pod) error {
	var ids [2]string
	for i, took := range []*[]time.Duration{&t.first[node], &t.second[node]} {
		contender.Check(contender.Timed(took, func() (err error) {
			ids[i], err = pod.Run(ctx, fmt.Sprintf("app%d", i), contender.App)
			return err
		}))
	}
	for range execs {
		contender.Check(contender.Timed(&t.exec[node], func() error { return execTrue(ctx, pod.Node, ids[0]) }))
	}
	for _, id := range ids {
		contender.Check(contender.Timed(&t.end[node], func() error {
			contender.Check(pod.Node.StopContainer(ctx, id))
			return contender.Timed(&t.remove[node], func() error { return pod.Node.RemoveContainer(ctx, id) })
		}))
	}
	return nil
}

func execTrue(ctx context.Context, n *contender.Node, id string) error {
	answer, err := n.CRI.ExecSync(ctx, &runtimeapi.ExecSyncRequest{ContainerId: id, Cmd: []string{"true"}})
	if err == nil && answer.GetExitCode() != 0 {
		err = fmt.Errorf("%s: true ended with %d", n.Name, answer.GetExitCode())
	}
	return err
}
