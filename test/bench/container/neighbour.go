package main

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"time"

	"github.com/minicri/minicri/test/bench/contender"
)

// neighbours is how many containers are started in the quiet pod, alone and
// beside the flood.
const neighbours = 100

// neighbour times containers of a quiet pod while another pod floods its logs, by
// a container for each processor.
func (c *comparison) neighbour(ctx context.Context) error {
	var alone, beside [2][]time.Duration
	for i, n := range c.nodes {
		pod, err := n.RunPod(ctx, "quiet")
		if err != nil {
			return err
		}
		if err := starts(ctx, pod, "alone", &alone[i]); err != nil {
			return err
		}
		end, err := flood(ctx, n)
		if err != nil {
			return err
		}
		err = starts(ctx, pod, "beside", &beside[i])
		if endErr := end(); err == nil {
			err = endErr
		}
		if err != nil {
			return err
		}
		if err := n.RemovePod(ctx, pod.ID); err != nil {
			return err
		}
	}
	row := contender.Row{What: "p99 of create + start beside a flood of logs, of that alone", MostOfOurs: 3}
	ratio := func(i int) float64 {
		return float64(contender.Quantile(beside[i], 0.99)) / float64(contender.Quantile(alone[i], 0.99))
	}
	row.Ours, row.Theirs = ratio(0), ratio(1)
	c.add(contender.Row{What: "p99 of create + start, alone, ms"}.Quantiles(alone, 0.99))
	c.add(row)
	return nil
}

// starts times containers one after the other.
func starts(ctx context.Context, pod *contender.Pod, name string, took *[]time.Duration) error {
	for k := range neighbours {
		id := ""
		err := contender.Timed(took, func() (err error) {
			id, err = pod.Run(ctx, fmt.Sprintf("%s%d", name, k), contender.App)
			return err
		})
		if err == nil {
			err = pod.Node.StopContainer(ctx, id)
		}
		if err == nil {
			err = pod.Node.RemoveContainer(ctx, id)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// flood writes logs until end is called. They are emptied meanwhile: they are in
// memory.
func flood(ctx context.Context, n *contender.Node) (end func() error, err error) {
	pod, err := n.RunPod(ctx, "flood")
	if err != nil {
		return nil, err
	}
	var logs []string
	for k := range runtime.NumCPU() {
		name := fmt.Sprintf("flood%d", k)
		if _, err := pod.Run(ctx, name, "/bin/sh", "-c", "while :; do cat "+contender.Lines+"; done"); err != nil {
			return nil, err
		}
		logs = append(logs, pod.LogPath(name))
	}
	stop := emptying(logs)
	return func() error {
		stop()
		return n.RemovePod(ctx, pod.ID)
	}, nil
}

// emptying empties logs again and again until stop is called.
func emptying(logs []string) (stop func()) {
	ended, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			for _, log := range logs {
				_ = os.Truncate(log, 0) // gone with its pod
			}
			select {
			case <-ended:
				return
			case <-time.After(50 * time.Millisecond):
			}
		}
	}()
	return func() {
		close(ended)
		<-done
	}
}
