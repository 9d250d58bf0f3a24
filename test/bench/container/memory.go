package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/bench/contender"
)

const (
	// floodMiB of newlines become 40 times as much of log.
	floodMiB = 64
	// loudExecs write loudMB to each of their outputs, of which the CRI takes 16 MiB.
	loudExecs, loudMB = 10, 20
	// largestAnswer is the kubelet's limit.
	largestAnswer = 16 << 20
)

// memory weighs daemon and supervisor before and after what makes them take most.
// Ours alone: containerd writes such a log for minutes.
func (c *comparison) memory(ctx context.Context) error {
	n := c.nodes[0]
	pod, err := n.RunPod(ctx, "memory")
	if err != nil {
		return err
	}
	app, err := pod.Run(ctx, "app", contender.App)
	if err != nil {
		return err
	}
	if err := execLoud(ctx, n, app); err != nil { // what the first one makes stays
		return err
	}
	time.Sleep(settle)
	before, err := n.Owners()
	if err != nil {
		return err
	}
	if err := floodNewlines(ctx, pod); err != nil {
		return err
	}
	for range loudExecs {
		if err := execLoud(ctx, n, app); err != nil {
			return err
		}
	}
	peak, err := n.Owners()
	if err != nil {
		return err
	}
	time.Sleep(settle)
	after, err := n.Owners()
	if err != nil {
		return err
	}
	mib := func(o contender.Owner) float64 { return float64(o.KiB) / 1024 }
	what := fmt.Sprintf("%v after %d MiB of newlines and %d ExecSync of 2 x %d MB, of before", settle, floodMiB, loudExecs, loudMB)
	c.add(contender.Row{What: "supervisor, idle, MiB", MostOfOurs: 6, Ours: mib(before.Shims)})
	c.add(contender.Row{What: "supervisor, at the end of the flood, MiB", Ours: mib(peak.Shims)})
	c.add(contender.Row{What: "supervisor, " + what, MostOfOurs: 1.3, Ours: mib(after.Shims) / mib(before.Shims)})
	c.add(contender.Row{What: "daemon, idle, MiB", Ours: mib(before.Daemon)})
	c.add(contender.Row{What: "daemon, at the end of the flood, MiB", Ours: mib(peak.Daemon)})
	c.add(contender.Row{What: "daemon, " + what, MostOfOurs: 1.3, Ours: mib(after.Daemon) / mib(before.Daemon)})
	return n.RemovePod(ctx, pod.ID)
}

// execLoud runs a command that writes more than is kept.
func execLoud(ctx context.Context, n *contender.Node, id string) error {
	script := fmt.Sprintf("dd if=/dev/zero bs=1000000 count=%[1]d; dd if=/dev/zero bs=1000000 count=%[1]d >&2", loudMB)
	request := &runtimeapi.ExecSyncRequest{ContainerId: id, Cmd: []string{"/bin/sh", "-c", script}, Timeout: 120}
	answer, err := n.CRI.ExecSync(ctx, request, grpc.MaxCallRecvMsgSize(2*largestAnswer+1<<20))
	if err == nil && answer.GetExitCode() != 0 {
		err = fmt.Errorf("the loud command ended with %d", answer.GetExitCode())
	}
	return err
}

// floodNewlines runs a container that writes nothing but ends of lines.
func floodNewlines(ctx context.Context, pod *contender.Pod) error {
	script := fmt.Sprintf("dd if=/dev/zero bs=65536 count=%d | tr '\\0' '\\n'", floodMiB<<4)
	id, err := pod.Run(ctx, "newlines", "/bin/sh", "-c", script)
	if err != nil {
		return err
	}
	defer emptying([]string{pod.LogPath("newlines")})()
	for {
		answer, err := pod.Node.CRI.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: id})
		if err != nil {
			return err
		}
		if status := answer.GetStatus(); status.GetState() == runtimeapi.ContainerState_CONTAINER_EXITED {
			if status.GetExitCode() != 0 {
				return fmt.Errorf("the flood ended with %d", status.GetExitCode())
			}
			return nil
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return errors.New("the flood does not end")
		}
	}
}
