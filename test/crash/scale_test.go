package crash

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/minicri/minicri/test/harness"
)

// restartBound is generous: the goal is a second, on a machine that does
// nothing else.
const restartBound = 3 * time.Second

// With 500 pods a daemon serves again soon, all of them Ready (P23).
//
// cri: PodSandbox.state
func TestProperty49_RestartWith500Pods(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-crash runs it")
	}
	// One in five has a network of its own, with an attachment to look after.
	const pods, ownNetworks = 500, 5
	n := harness.NewNode(t)
	var all sync.WaitGroup
	slots := make(chan struct{}, 8)
	for i := range pods {
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
	n.Kill()
	began := time.Now()
	n.Start()
	took := time.Since(began)
	fmt.Printf("restart with %d pods: serving after %v\n", pods, took.Round(time.Millisecond))
	if took > restartBound {
		t.Errorf("serving after %v, want at most %v", took, restartBound)
	}
	node := &node{Node: n}
	for _, pod := range node.list(t) {
		if pod.State != 0 {
			t.Errorf("sandbox %s is not Ready", pod.Id)
		}
	}
	if got := len(node.list(t)); got != pods {
		t.Errorf("%d sandboxes are listed, want %d", got, pods)
	}
}
