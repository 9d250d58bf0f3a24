package stream

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// slowBridge is the bridge plugin, which waits at a verb as long as there is a file
// for the pod and the verb.
const slowBridge = `#!/bin/sh
pod=${CNI_ARGS##*K8S_POD_NAME=}
gate=%[1]s/$CNI_COMMAND-${pod%%%%;*}
if [ -e "$gate" ]; then
	: >"$gate.began"
	while [ -e "$gate" ]; do sleep 0.05; done
fi
exec %[2]s
`

// withSlowBridge installs it, and returns what makes a pod wait at a verb.
func withSlowBridge(t *testing.T, n *harness.Node) (gate func(verb, pod string) string) {
	t.Helper()
	dir := filepath.Join(n.Dir, "gates")
	check(t, os.Mkdir(dir, 0o755))
	check(t, os.WriteFile(filepath.Join(n.Plugins, "bridge"), fmt.Appendf(nil, slowBridge, dir, filepath.Join(n.CNIBin, "bridge")), 0o755))
	return func(verb, pod string) string {
		path := filepath.Join(dir, verb+"-"+pod)
		check(t, os.WriteFile(path, nil, 0o644))
		t.Cleanup(func() { os.Remove(path) })
		return path
	}
}

// withoutCRI stops and starts the daemon, and returns the longest time for which
// its socket gave no answer.
func withoutCRI(t *testing.T, n *harness.Node) (longest time.Duration) {
	t.Helper()
	ctx, cancel := context.WithCancel(limited(t))
	var wait sync.WaitGroup
	began := make(chan struct{})
	wait.Go(func() {
		for last := time.Now(); ctx.Err() == nil; time.Sleep(2 * time.Millisecond) {
			if answers(ctx, n) {
				longest, last = max(longest, time.Since(last)), time.Now()
				select {
				case <-began:
				default:
					close(began)
				}
			}
		}
	})
	<-began
	n.Restart()
	time.Sleep(50 * time.Millisecond)
	cancel()
	wait.Wait()
	return longest
}

// answers asks over a connection of its own: one that lost its daemon waits before
// it tries again.
func answers(ctx context.Context, n *harness.Node) bool {
	conn, err := grpc.NewClient("unix://"+n.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return false
	}
	defer conn.Close()
	_, err = runtimeapi.NewRuntimeServiceClient(conn).Version(ctx, &runtimeapi.VersionRequest{})
	return err == nil
}

// A restart by SIGTERM leaves the node without a CRI for no longer than a start
// takes, whatever is under way: what can be asked again
// ends at once, and for what is awaited the socket answers meanwhile. Nothing
// happens to the containers, and what was cut is taken up.
func TestRestartBesideWhateverIsUnderWay(t *testing.T) {
	p := newPod(t, "trap '' TERM USR1; while read x; do echo got $x; done; while :; do sleep 1; done",
		func(c *runtimeapi.ContainerConfig) { c.Stdin = true }, harness.Config("[limits]\nshutdown = '6s'\ncni_add = '50s'\ncni_del = '50s'"))
	idle := withoutCRI(t, p.Node)
	gate := withSlowBridge(t, p.Node)
	ending := p.PodConfig("ends")
	ended := p.RunPod(ending)
	gates := []string{gate("ADD", "adds"), gate("DEL", "ends")}
	calls := p.beginAll(ended)
	for _, path := range gates {
		eventually(t, path+" waits", func() bool { _, err := os.Stat(path + ".began"); return err == nil })
	}
	took := withoutCRI(t, p.Node)
	fmt.Printf("SIGTERM beside all kinds of calls: %v without a CRI, %v beside none\n", took.Round(time.Millisecond), idle.Round(time.Millisecond))
	// Most of it is the start of a daemon, which takes a busy machine long; what waited
	// for a call would take the six seconds of the shutdown more.
	if took > 2*time.Second+3*idle {
		t.Errorf("%v without a CRI, and %v beside no calls", took, idle)
	}
	for name, call := range calls {
		select {
		case <-call:
		case <-time.After(patience):
			t.Errorf("%s does not end", name)
		}
	}
	status, err := p.Runtime.ContainerStatus(limited(t), &runtimeapi.ContainerStatusRequest{ContainerId: p.container})
	check(t, err)
	if status.Status.State != runtimeapi.ContainerState_CONTAINER_RUNNING {
		t.Errorf("the container is %v", status.Status)
	}
	for _, path := range gates {
		check(t, os.Remove(path))
	}
	p.RemovePod(ended)
	p.RemovePod(p.RunPod(p.PodConfig("adds")))
}

// beginAll begins a call of each kind that takes long; each channel is closed when
// its call has ended.
func (p *pod) beginAll(ended string) (calls map[string]chan struct{}) {
	p.t.Helper()
	ctx := limited(p.t)
	calls = make(map[string]chan struct{})
	begin := func(name string, call func()) {
		done := make(chan struct{})
		calls[name] = done
		go func() {
			defer close(done)
			call()
		}()
	}
	begin("StopContainer", func() {
		_, _ = p.Runtime.StopContainer(ctx, &runtimeapi.StopContainerRequest{ContainerId: p.container, Timeout: 1000})
	})
	execs := make(chan struct{})
	begin("ExecSync", func() {
		close(execs)
		_, _ = p.Runtime.ExecSync(ctx, &runtimeapi.ExecSyncRequest{ContainerId: p.container, Cmd: []string{"tail", "-f", "/dev/null"}})
	})
	<-execs
	begin("GetContainerEvents", func() {
		events, err := p.Runtime.GetContainerEvents(ctx, &runtimeapi.GetEventsRequest{})
		for err == nil {
			_, err = events.Recv()
		}
	})
	// A registry that takes connections, and never answers.
	image := &runtimeapi.ImageSpec{Image: p.Listen("127.0.0.1:0").Addr().String() + "/never:1"}
	begin("PullImage", func() {
		_, _ = p.Image.PullImage(ctx, &runtimeapi.PullImageRequest{Image: image})
	})
	adding := p.PodConfig("adds")
	begin("RunPodSandbox", func() {
		_, _ = p.Runtime.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: adding})
	})
	begin("StopPodSandbox", func() {
		_, _ = p.Runtime.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: ended})
	})
	in, types := io.Pipe()
	var out safe
	attach := spdyClient(p.t, p.attachURL(&runtimeapi.AttachRequest{Stdin: true, Stdout: true, Stderr: true}))
	begin("an attach session", func() {
		_ = attach.StreamWithContext(ctx, remotecommand.StreamOptions{Stdin: in, Stdout: &out, Stderr: io.Discard})
	})
	eventually(p.t, "the session moves bytes", func() bool {
		fmt.Fprintln(types, "x")
		return len(out.String()) > 0
	})
	return calls
}
