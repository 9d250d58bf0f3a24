package e2e

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// answerTime is the longest that an answer from memory may take.
const answerTime = time.Second

// wantSoon fails the test when the call does not answer within answerTime, or answers
// only when the process of the plugin that hangs has ended. The best of a few tries
// counts: the machine does other work, too.
func wantSoon(t *testing.T, what string, plugin int, call func() error) {
	t.Helper()
	best := time.Hour
	for range 5 {
		began := time.Now()
		check(t, call())
		best = min(best, time.Since(began))
		if !alive(plugin) {
			t.Errorf("%s took %v, and the plugin does not hang any more", what, time.Since(began))
			return
		}
		if best < answerTime {
			return
		}
	}
	t.Errorf("%s took %v", what, best)
}

// While an ADD hangs everything else works, a change of the network included.
//
// cri: PodSandboxStatusRequest.verbose StatusRequest.verbose
func TestProperty14_HangingADD(t *testing.T) {
	n := newNode(t, harness.NoNetwork(), harness.Config(fast))
	r := newRecorder(t, n)
	n.WriteConflist("10-test.conflist", r.bridge("one"), r.plugin("two", nil))
	other := n.RunPod(n.PodConfig("other"))

	r.order("two", "ADD", "hang")
	failed := make(chan error, 1)
	go func() {
		_, err := n.Runtime.RunPodSandbox(context.Background(), &runtimeapi.RunPodSandboxRequest{Config: n.PodConfig("hangs")})
		failed <- err
	}()
	pids := r.hung()
	r.order("two", "ADD", "")
	wantSoon(t, "Status", pids[0], func() error {
		_, err := n.Runtime.Status(limited(t), &runtimeapi.StatusRequest{Verbose: true})
		return err
	})
	wantSoon(t, "ListPodSandbox", pids[0], func() error {
		_, err := n.Runtime.ListPodSandbox(limited(t), &runtimeapi.ListPodSandboxRequest{})
		return err
	})
	wantSoon(t, "PodSandboxStatus", pids[0], func() error {
		_, err := n.Runtime.PodSandboxStatus(limited(t), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: other, Verbose: true})
		return err
	})
	third := n.RunPod(n.PodConfig("third"))
	check(t, remove(t, n, third))
	n.WriteConflist("10-test.conflist", r.bridge("one"), r.plugin("two", harness.Object{"new": true}))
	eventually(t, "the new configuration is in effect", patience, func() bool {
		return strings.Contains(fmt.Sprint(harness.Info[any](t, n, "cniconfig")), "new")
	})
	building := harness.Info[[]struct {
		Name  string
		Stage struct{ Step string }
	}](t, n, "building")
	if len(building) != 1 || building[0].Name != "test/hangs" || building[0].Stage.Step != "cni add" {
		t.Errorf("the verbose status says that is being built: %+v", building)
	}
	if !alive(pids[0]) {
		t.Error("the ADD does not hang any more")
	}

	// A plugin that is killed by another one fails like any other.
	check(t, unix.Kill(pids[1], unix.SIGKILL))
	if err := <-failed; err == nil || !strings.Contains(err.Error(), "plugin two") || !strings.Contains(err.Error(), "ADD") {
		t.Errorf("got %v", err)
	}
	eventually(t, "only the other pod has an address", patience, func() bool { return len(addresses(t, n)) == 1 })
}

func TestProperty15_CancelledInTheMiddleOfADD(t *testing.T) {
	n := newNode(t, harness.NoNetwork())
	r := newRecorder(t, n)
	n.WriteConflist("10-test.conflist", r.bridge("one"))
	r.order("one", "ADD", "wait")
	ctx, cancel := context.WithCancel(context.Background())
	first := make(chan error, 1)
	go func() {
		_, err := n.Runtime.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: n.PodConfig("web")})
		first <- err
	}()
	eventually(t, "ADD runs", patience, func() bool { return len(r.calls("ADD")) == 1 })
	cancel()
	if err := <-first; err == nil {
		t.Error("no error for the caller that gave up")
	}
	if pods := list(t, n, nil); len(pods) != 0 {
		t.Errorf("a half-made pod is listed: %v", pods)
	}
	r.order("one", "ADD", "")
	// The work went on and is handed to the retry.
	id := n.RunPod(n.PodConfig("web"))
	if got := r.calls("ADD"); len(got) != 1 || got[0].Container != id {
		t.Errorf("pod %s, plugin calls %s", id, sequence(got))
	}
}

// cri: RunPodSandboxRequest.config
func TestProperty16_DuplicatesAreJoined(t *testing.T) {
	n := newNode(t, harness.NoNetwork())
	r := newRecorder(t, n)
	n.WriteConflist("10-test.conflist", r.bridge("one"))
	r.order("one", "ADD", "wait")
	first, giveUp := context.WithCancel(context.Background())
	go n.Runtime.RunPodSandbox(first, &runtimeapi.RunPodSandboxRequest{Config: n.PodConfig("web")})
	eventually(t, "ADD runs", patience, func() bool { return len(r.calls("ADD")) == 1 })

	answers := make([]string, 20)
	var all sync.WaitGroup
	for i := range answers {
		all.Go(func() {
			id, err := run(t, n, n.PodConfig("web"))
			if err != nil {
				t.Error(err)
			}
			answers[i] = id
		})
	}
	giveUp()
	r.order("one", "ADD", "")
	all.Wait()
	for _, id := range answers {
		if id == "" || id != answers[0] {
			t.Fatalf("several pods: %v", answers)
		}
	}
	if again := n.RunPod(n.PodConfig("web")); again != answers[0] {
		t.Errorf("asked again, it is %s", again)
	}
	if calls := r.calls("ADD"); len(calls) != 1 || len(list(t, n, nil)) != 1 {
		t.Errorf("ADD ran %d times, pods %v", len(calls), list(t, n, nil))
	}
}

// cri: PodSandboxNetworkStatus.ip PodSandboxStatus.network
func TestProperty26_ManyPodsAtOnce(t *testing.T) {
	n := newNode(t, harness.DualStack())
	const count = 50
	pods := make([]string, count)
	each(count, func(i int) {
		id, err := run(t, n, n.PodConfig(fmt.Sprint("pod-", i)))
		if err != nil {
			t.Error(err)
		}
		pods[i] = id
	})
	seen := map[string]bool{}
	for _, id := range pods {
		seen[podStatus(t, n, id).Network.Ip] = true
	}
	if len(seen) != count || len(list(t, n, nil)) != count || len(addresses(t, n)) != 2*count {
		t.Errorf("%d addresses, %d pods, host-local has %d", len(seen), len(list(t, n, nil)), len(addresses(t, n)))
	}
	each(count, func(i int) {
		if err := stop(t, n, pods[i]); err != nil {
			t.Error(err)
		}
		if err := remove(t, n, pods[i]); err != nil {
			t.Error(err)
		}
	})
}

func each(count int, do func(i int)) {
	var all sync.WaitGroup
	for i := range count {
		all.Go(func() { do(i) })
	}
	all.Wait()
}
