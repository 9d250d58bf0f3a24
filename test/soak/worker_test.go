package soak

import (
	"context"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/leak"
)

// soak is what killer and workers share.
type soak struct {
	t         *testing.T
	node      *harness.Node
	before    leak.Snapshot // without a pod
	witnesses []*runtimeapi.PodSandboxStatus
	slowest   time.Duration // start of the daemon

	// world is held by each worker for the life of one pod, and for itself alone by
	// a reboot, which ends all pods.
	world           sync.RWMutex
	mu              sync.RWMutex // of the node's client, which each start replaces
	cycles, repeats atomic.Int64
	owners          sync.Map // of each address, the id of the sandbox
}

func (s *soak) client() runtimeapi.RuntimeServiceClient {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.node.Runtime
}

// patience is the longest that any single thing may take to succeed at last.
const patience = 3 * time.Minute

func (s *soak) limited() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	s.t.Cleanup(cancel)
	return ctx
}

func (s *soak) status(id string) *runtimeapi.PodSandboxStatus {
	answer, err := s.client().PodSandboxStatus(s.limited(), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id})
	if err != nil {
		s.t.Errorf("PodSandboxStatus %s: %v", id, err)
	}
	return answer.GetStatus()
}

// worker behaves as a kubelet does with one pod: it asks until it succeeds.
type worker struct {
	*soak
	name    string
	port    int32
	attempt uint32
	random  *rand.Rand
}

func (w *worker) work(end time.Time) {
	for time.Now().Before(end) && !w.t.Failed() {
		if !w.live() {
			return
		}
	}
	w.world.RLock()
	defer w.world.RUnlock()
	w.removeListed() // what was being made at a reboot; a kubelet removes what is not Ready
}

// live is the life of one pod.
func (w *worker) live() bool {
	w.world.RLock()
	defer w.world.RUnlock()
	config := w.config()
	id := w.runPod(config)
	if id == "" {
		return false
	}
	address := w.checkReady(id, config)
	time.Sleep(time.Duration(w.random.Int64N(int64(300 * time.Millisecond))))
	w.owners.Delete(address)
	w.removePod(id)
	w.cycles.Add(1)
	return true
}

// config is that of the next sandbox: of any kind, sometimes with host ports.
func (w *worker) config() *runtimeapi.PodSandboxConfig {
	w.attempt++
	options := []harness.PodOption{harness.Attempt(w.attempt)}
	switch w.random.IntN(4) {
	case 0:
		options = append(options, harness.HostNetwork())
	case 1:
		options = append(options, harness.UserNamespace)
	case 2:
		options = append(options, harness.HostPort(w.port, 80))
	}
	return w.node.PodConfig(w.name, options...)
}

// runPod asks for the pod until it is Ready, with little patience each time.
func (w *worker) runPod(config *runtimeapi.PodSandboxConfig) (id string) {
	w.until("run "+w.name, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, time.Duration(w.random.Int64N(int64(2*time.Second))))
		defer cancel()
		answer, err := w.client().RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: config})
		id = answer.GetPodSandboxId()
		if status.Code(err) == codes.AlreadyExists {
			// One that could not be rolled back: a kubelet continues with another.
			config.Metadata.Attempt++
			w.attempt++
			w.removeListed()
		}
		return err
	})
	return id
}

// removeListed removes all sandboxes of the worker's pod.
func (w *worker) removeListed() {
	var answer *runtimeapi.ListPodSandboxResponse
	w.until("list "+w.name, func(ctx context.Context) (err error) {
		answer, err = w.client().ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
		return err
	})
	for _, pod := range answer.GetItems() {
		if pod.Metadata.Name == w.name {
			w.removePod(pod.Id)
		}
	}
}

// checkReady: the status is that of a pod that can be used, with an address
// that no other pod has.
func (w *worker) checkReady(id string, config *runtimeapi.PodSandboxConfig) (address string) {
	var pod *runtimeapi.PodSandboxStatus
	w.until("status "+w.name, func(ctx context.Context) error {
		answer, err := w.client().PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id})
		pod = answer.GetStatus()
		return err
	})
	address = pod.GetNetwork().GetIp()
	onNode := config.Linux.SecurityContext.NamespaceOptions.Network == runtimeapi.NamespaceMode_NODE
	if pod.GetState() != runtimeapi.PodSandboxState_SANDBOX_READY || (address == "") != onNode {
		w.t.Errorf("a pod that was run is %v", pod)
	}
	if other, taken := w.owners.LoadOrStore(address, id); taken && !onNode {
		w.t.Errorf("address %s is that of %s and of %v", address, id, other)
	}
	return address
}

func (w *worker) removePod(id string) {
	w.until("stop "+w.name, func(ctx context.Context) error {
		_, err := w.client().StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: id})
		return err
	})
	w.until("remove "+w.name, func(ctx context.Context) error {
		_, err := w.client().RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id})
		return err
	})
}

// until repeats a request until it succeeds; each failure has its reason in
// the daemon's end, in a plugin that was told to fail or in the worker's own
// impatience.
func (w *worker) until(what string, request func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var last error
	for ctx.Err() == nil && !w.t.Failed() {
		if last = request(ctx); last == nil {
			return
		}
		switch status.Code(last) {
		case codes.Unavailable, codes.DeadlineExceeded, codes.AlreadyExists, codes.Canceled: // the last by the harness, which hangs up
		default:
			if strings.Contains(last.Error(), "CNI ") {
				break // a plugin failed or hung, as it was told
			}
			w.t.Errorf("%s: %v", what, last)
		}
		w.repeats.Add(1)
		time.Sleep(5 * time.Millisecond)
	}
	w.t.Errorf("%s: no success within %v: %v", what, patience, last)
}
