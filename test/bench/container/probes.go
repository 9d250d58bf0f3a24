package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/bench/contender"
)

// probeBlock of the probes are made at one node before it is the other's turn.
const probeBlock = 100

// probes measures what a kubelet's exec probes cost, in a container as users have it: with
// the runtime's default filter of system calls, and its AppArmor profile where the
// machine has AppArmor. The CPU is user and system time of the daemon, its shims and all
// children that these have waited for: starters, runc, and the command itself.
func (c *comparison) probes(ctx context.Context) error {
	var ids [2]string
	var pods [2]*contender.Pod
	for i, n := range c.nodes {
		pod := contender.Must(n.RunPod(ctx, "probed"))
		pod.Seccomp = runtimeapi.SecurityProfile_RuntimeDefault
		ids[i] = contender.Must(pod.Run(ctx, "app", contender.App))
		pods[i] = pod
	}
	var took, used [2][]time.Duration
	contender.Check(contender.Alternate(c.probeCount/probeBlock, func(_, i int) error {
		before, err := c.nodes[i].CPUWithChildren()
		for k := 0; k < probeBlock && err == nil; k++ {
			err = contender.Timed(&took[i], func() error { return execTrue(ctx, c.nodes[i], ids[i]) })
		}
		if err != nil {
			return err
		}
		time.Sleep(100 * time.Millisecond) // what ends after the answer is waited for
		after, err := c.nodes[i].CPUWithChildren()
		used[i] = append(used[i], after-before)
		return err
	}))
	total := func(all []time.Duration) (sum float64) {
		for _, one := range all {
			sum += contender.Milliseconds(one)
		}
		return sum
	}
	with := "RuntimeDefault, no AppArmor"
	if enabled, _ := os.ReadFile("/sys/module/apparmor/parameters/enabled"); strings.HasPrefix(string(enabled), "Y") {
		with = "RuntimeDefault and AppArmor"
	}
	c.add(contender.Row{What: fmt.Sprintf("%d exec probes, %s, ms of CPU", len(took[0]), with), AtMost: 0.5}.Numbers(used, total))
	c.add(contender.Row{What: "one of them, p50 ms", AtMost: 0.5}.Medians(took))
	for i, pod := range pods {
		contender.Check(c.nodes[i].RemovePod(ctx, pod.ID))
	}
	return nil
}
