package crash

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

// many are more pods than a kubelet runs. One in five has a network of its own, with an attachment to look after.
const many, ownNetworks = 1000, 5

func runMany(n *nodetest.Node, count int) {
	var all sync.WaitGroup
	slots := make(chan struct{}, 8)
	for i := range count {
		slots <- struct{}{}
		all.Go(func() {
			config := n.PodConfig(fmt.Sprintf("pod-%d", i), nodetest.HostNetwork())
			if i%ownNetworks == 0 {
				config = n.PodConfig(config.Metadata.Name)
			}
			n.RunPod(config)
			<-slots
		})
	}
	all.Wait()
}

// With 1000 pods a daemon serves again after a restart, all of them Ready (P23), and has the timeline of each. While
// their supervisor hangs, lists, statistics, statuses and streams come in messages that a kubelet reads (P50). How long
// each takes is printed.
//
// cri: PodSandbox.state StreamPodSandboxesResponse.pod_sandboxes
func TestProperty49_RestartWith1000Pods(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-crash runs it")
	}
	n := nodetest.New(t)
	runMany(n, many)
	ctx := harness.Limited(t) // the harness's clients read as much as the kubelet
	timed := func(what string, want int, ask func() (count int, err error)) {
		began := time.Now()
		count, err := ask()
		took := time.Since(began)
		fmt.Printf("%s with %d pods: %v\n", what, many, took.Round(time.Millisecond))
		harness.Check(t, err)
		harness.Same(t, what, count, want)
	}
	n.Kill()
	timed("restart", 0, func() (int, error) { return 0, n.TryStart() })
	pods := (&node{Node: n}).list(t)
	harness.Same(t, "sandboxes listed", len(pods), many)
	for _, pod := range pods {
		harness.Same(t, "state of sandbox "+pod.Id, pod.State, runtimeapi.PodSandboxState_SANDBOX_READY)
	}
	timed("minicri timeline", 1, func() (int, error) {
		text, err := n.RunCommand("timeline", "pod-500")
		return min(1, strings.Count(text, "cni add")), err
	})
	for _, pid := range n.Supervisors() {
		harness.Freeze(t, pid)
	}
	timed("ListPodSandbox", many, func() (int, error) {
		list, err := n.Runtime.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
		return len(list.GetItems()), err
	})
	timed("ListContainers", 0, func() (int, error) {
		list, err := n.Runtime.ListContainers(ctx, &runtimeapi.ListContainersRequest{})
		return len(list.GetContainers()), err
	})
	timed("ListPodSandboxStats", many, func() (int, error) {
		list, err := n.Runtime.ListPodSandboxStats(ctx, &runtimeapi.ListPodSandboxStatsRequest{})
		return len(list.GetStats()), err
	})
	timed("StreamPodSandboxes", many, func() (count int, err error) {
		stream, err := n.Runtime.StreamPodSandboxes(ctx, &runtimeapi.StreamPodSandboxesRequest{})
		for err == nil {
			var piece *runtimeapi.StreamPodSandboxesResponse
			piece, err = stream.Recv()
			count += len(piece.GetPodSandboxes())
		}
		if errors.Is(err, io.EOF) {
			err = nil
		}
		return count, err
	})
	timed("PodSandboxStatus", 1, func() (int, error) {
		_, err := n.Runtime.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: pods[0].Id, Verbose: true})
		return 1, err
	})
}

// 100,000 health checks, by clients that come and go, leave no descriptor, no thread
// to speak of and no memory; what the first thousands made stays as it is.
func TestProperty57_HealthChecksLeakNothing(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-crash runs it")
	}
	const first, all, clients = 10000, 100000, 8
	n := newNode(t)
	n.runWitness(t)
	ping := func(times int) {
		ctx := harness.Limited(t)
		var wait sync.WaitGroup
		for range clients {
			wait.Go(func() {
				var err error
				for i := 0; i < times/clients && err == nil; i++ {
					_, wrong := n.Runtime.Version(ctx, &runtimeapi.VersionRequest{})
					_, err = n.Runtime.Status(ctx, &runtimeapi.StatusRequest{})
					err = errors.Join(wrong, err)
				}
				harness.Want(t, err == nil, "%v", err)
			})
		}
		wait.Wait()
	}
	open := func() int {
		files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", n.PID()))
		harness.Check(t, err)
		return len(files)
	}
	// What a process has allocated: not pages of its program, which the kernel drops when memory is short.
	anonymous := func() int { return harness.ProcKiB(t, n.PID(), "RssAnon") }
	ping(first)
	before, files := anonymous(), open()
	ping(all - first)
	fmt.Printf("%d health checks: the daemon has %d KiB, after the first %d it had %d KiB; %d descriptors, %d\n", all, anonymous(), first, before, open(), files)
	// What was allocated in a burst is collected, and given back, when it is over.
	harness.Eventually(t, fmt.Sprintf("it has what it had, %d KiB, and 2 MiB at most", before), func() bool { return anonymous() <= before+2<<10 })
	now := open()
	harness.Want(t, now <= files+4, "%d descriptors, there were %d", now, files)
}
