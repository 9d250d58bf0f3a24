package main

import (
	"context"
	"fmt"
	"time"

	"github.com/minicri/minicri/test/bench/contender"
)

// transferMiB is how much goes over a stream.
const transferMiB = 256

// zeros writes as much.
var zeros = []string{"dd", "if=/dev/zero", "bs=64k", fmt.Sprintf("count=%d", transferMiB<<20/(64<<10))}

// serve is the container: anyone who connects to its port gets zeros.
var serve = append([]string{"nc", "-ll", "-p", "7", "-e"}, zeros...)

// target is a pod whose container serves.
type target struct {
	node      *contender.Node
	pod       *contender.Pod
	container string
}

// warmUp starts do not count.
const warmUp = 3

// firstBytes times execs from the call to the first byte of their output.
func firstBytes(ctx context.Context, targets [2]*target, starts int) (contender.Row, error) {
	var took [2][]time.Duration
	err := contender.Alternate(warmUp+starts, func(round, i int) error {
		one, err := targets[i].firstByte(ctx)
		if round >= warmUp {
			took[i] = append(took[i], one)
		}
		return err
	})
	if err != nil {
		return contender.Row{}, err
	}
	row := contender.Row{What: "exec, to the first byte, p50 ms", AtMost: 0.4}
	return row.Medians(took), nil
}

// transfer moves transferMiB, one way or another.
type transfer struct {
	name string
	move func(*target, context.Context) error
}

// compare times transfers and their cost.
func (k transfer) compare(ctx context.Context, targets [2]*target, transfers int) ([]contender.Row, error) {
	var took, used [2][]time.Duration
	err := contender.Alternate(transfers, func(_, i int) error {
		before, err := targets[i].node.CPU()
		if err != nil {
			return err
		}
		began := time.Now()
		if err := k.move(targets[i], ctx); err != nil {
			return fmt.Errorf("%s: %s: %w", targets[i].node.Name, k.name, err)
		}
		wall := time.Since(began)
		after, err := targets[i].node.CPU()
		took[i], used[i] = append(took[i], wall), append(used[i], after-before)
		return err
	})
	rate := contender.Row{What: k.name + ", MiB/s", AtLeast: 1.5}
	cost := contender.Row{What: "CPU of daemon and shim, ms/MiB", AtMost: 1}
	return []contender.Row{rate.Rates(took, transferMiB), cost.Costs(used, transferMiB)}, err
}
