package crash

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// many are more pods than a kubelet runs. One in five has a network of its own,
// with an attachment to look after.
const many, ownNetworks = 1000, 5

// restartBound and listBound are generous: the goals are a second, and some
// milliseconds, on a machine that does nothing else.
const restartBound, listBound = 5 * time.Second, 5 * time.Second

// runMany runs pods, some at a time.
func runMany(n *harness.Node, count int) {
	var all sync.WaitGroup
	slots := make(chan struct{}, 8)
	for i := range count {
		slots <- struct{}{}
		all.Go(func() {
			config := n.PodConfig(fmt.Sprintf("pod-%d", i), harness.HostNetwork())
			if i%ownNetworks == 0 {
				config = n.PodConfig(config.Metadata.Name)
			}
			n.RunPod(config)
			<-slots
		})
	}
	all.Wait()
}

// With 1000 pods a daemon serves again soon, all of them Ready (P23), and one of
// their timelines is found at once.
//
// cri: PodSandbox.state
func TestProperty49_RestartWith1000Pods(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-crash runs it")
	}
	n := harness.NewNode(t)
	runMany(n, many)
	n.Kill()
	began := time.Now()
	n.Start()
	took := time.Since(began)
	fmt.Printf("restart with %d pods: serving after %v\n", many, took.Round(time.Millisecond))
	if took > restartBound {
		t.Errorf("serving after %v, want at most %v", took, restartBound)
	}
	node := &node{Node: n}
	pods := node.list(t)
	for _, pod := range pods {
		if pod.State != 0 {
			t.Errorf("sandbox %s is not Ready", pod.Id)
		}
	}
	if got := len(pods); got != many {
		t.Errorf("%d sandboxes are listed, want %d", got, many)
	}
	began = time.Now()
	text, err := n.RunCommand("timeline", "pod-500")
	took = time.Since(began)
	fmt.Printf("minicri timeline of one of %d pods: %v\n", many, took.Round(time.Millisecond))
	if err != nil || !strings.Contains(text, "cni add") || took > listBound {
		t.Errorf("the timeline took %v: %v\n%s", took, err, text)
	}
}

// Lists, statistics, statuses and streams of 1000 pods come in bounded time, in
// messages that a kubelet reads, while their supervisor hangs.
//
// cri: StreamPodSandboxesResponse.pod_sandboxes
func TestProperty50_ListsBesideShimsThatHang(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-crash runs it")
	}
	n := harness.NewNode(t)
	runMany(n, many)
	pods, err := n.Runtime.ListPodSandbox(limited(t), &runtimeapi.ListPodSandboxRequest{})
	check(t, err)
	hung := pods.Items[0].Id
	for _, pid := range n.Supervisors() {
		check(t, unix.Kill(pid, unix.SIGSTOP))
		t.Cleanup(func() { _ = unix.Kill(pid, unix.SIGCONT) }) // it may have been replaced
	}
	ctx, largest := harness.Limited(t, 10*listBound), grpc.MaxCallRecvMsgSize(16<<20)
	within := func(what string, ask func() (proto.Message, int, error)) {
		t.Helper()
		began := time.Now()
		message, count, err := ask()
		took := time.Since(began)
		fmt.Printf("%s beside a supervisor that hangs: %d objects, %d KiB, %v\n", what, count, proto.Size(message)>>10, took.Round(time.Millisecond))
		if err != nil || took > listBound {
			t.Errorf("%s took %v: %v", what, took, err)
		}
	}
	within("ListPodSandbox", func() (proto.Message, int, error) {
		list, err := n.Runtime.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{}, largest)
		if len(list.GetItems()) != many {
			t.Errorf("%d pods are listed", len(list.GetItems()))
		}
		return list, len(list.GetItems()), err
	})
	within("ListContainers", func() (proto.Message, int, error) {
		list, err := n.Runtime.ListContainers(ctx, &runtimeapi.ListContainersRequest{}, largest)
		return list, len(list.GetContainers()), err
	})
	within("ListPodSandboxStats", func() (proto.Message, int, error) {
		list, err := n.Runtime.ListPodSandboxStats(ctx, &runtimeapi.ListPodSandboxStatsRequest{}, largest)
		if len(list.GetStats()) != many {
			t.Errorf("statistics of %d pods", len(list.GetStats()))
		}
		return list, len(list.GetStats()), err
	})
	within("StreamPodSandboxes", func() (proto.Message, int, error) {
		stream, err := n.Runtime.StreamPodSandboxes(ctx, &runtimeapi.StreamPodSandboxesRequest{}, largest)
		check(t, err)
		all := &runtimeapi.StreamPodSandboxesResponse{}
		for {
			piece, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				return all, len(all.PodSandboxes), nil
			}
			if err != nil {
				return all, len(all.PodSandboxes), err
			}
			all.PodSandboxes = append(all.PodSandboxes, piece.PodSandboxes...)
		}
	})
	within("PodSandboxStatus of one that hangs", func() (proto.Message, int, error) {
		answer, err := n.Runtime.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: hung, Verbose: true}, largest)
		return answer, 1, err
	})
}
