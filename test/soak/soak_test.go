package soak

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/leak"
	"github.com/minicri/minicri/test/nodetest"
)

func TestMain(m *testing.M) { os.Exit(nodetest.Main(m)) }

// workers are so many that the machine is busy and the daemon is never idle.
const workers = 6

// longestLife is the most that passes between two strikes.
const longestLife = 2 * time.Second

// strikesAtOnce is after how many strikes pods have to come and go before the next: on a busy machine a pod takes
// longer than the daemon lives, and what the one daemon leaves partially created is all that the next one does.
const strikesAtOnce = 4

func TestSoak(t *testing.T) {
	duration, err := time.ParseDuration(cmp.Or(os.Getenv("SOAK"), "20s"))
	harness.Check(t, err)
	seed, err := strconv.ParseUint(cmp.Or(os.Getenv("SEED"), strconv.FormatUint(rand.Uint64(), 10)), 10, 64)
	harness.Check(t, err)
	fmt.Printf("soak: %v with %d workers, SEED=%d\n", duration, workers, seed)

	s := newSoak(t)
	faults := s.run(seed, time.Now().Add(duration))
	s.wantNothingListed()
	for _, pod := range s.witnesses {
		s.node.RemovePod(pod.Id)
	}
	differences := s.node.Differences(s.before)
	fmt.Printf("soak: %d pods came and went, %d requests were repeated; %v; slowest start %v, %d leaks\n",
		s.cycles.Load(), s.repeats.Load(), faults, s.slowest.Round(time.Millisecond), len(differences))
	for _, difference := range differences {
		t.Error(difference)
	}
}

func newSoak(t *testing.T) *soak {
	s := &soak{t: t, ctx: harness.Limited(t), node: nodetest.New(t, nodetest.PortMap(), nodetest.Config(limits))}
	s.addFaulty()
	s.before = s.node.Look()
	s.runWitnesses()
	return s
}

func (s *soak) runWitnesses() {
	s.witnesses = nil
	for _, config := range []*runtimeapi.PodSandboxConfig{
		s.node.PodConfig("stays"), s.node.PodConfig("stays-userns", nodetest.UserNamespace), s.node.PodConfig("stays-host", nodetest.HostNetwork()),
	} {
		s.witnesses = append(s.witnesses, s.status(s.node.RunPod(config)))
	}
}

// run lets the workers work, and strikes again and again until the time is over.
func (s *soak) run(seed uint64, end time.Time) (faults counts) {
	var all sync.WaitGroup
	defer all.Wait()
	for i := range workers {
		w := &worker{soak: s, name: fmt.Sprintf("pod-%d", i), port: int32(8000 + i), random: rand.New(rand.NewPCG(seed, uint64(i)))}
		all.Go(func() { w.work(end) })
	}
	random := rand.New(rand.NewPCG(seed, workers))
	time.Sleep(longestLife)
	faults.reboots++ // one at least, however short the time
	s.reboot()
	for strikes := 0; time.Now().Before(end) && !s.t.Failed(); strikes++ {
		time.Sleep(time.Duration(random.Int64N(int64(longestLife))))
		if strikes%strikesAtOnce == 0 {
			s.awaitPods(end)
		}
		s.strike(random, &faults)
	}
	return faults
}

// awaitPods waits until as many pods have gone as there are workers.
func (s *soak) awaitPods(end time.Time) {
	for enough := s.cycles.Load() + workers; s.cycles.Load() < enough && time.Now().Before(end) && !s.t.Failed(); {
		time.Sleep(10 * time.Millisecond)
	}
}

// restart keeps the workers from asking for a client meanwhile.
func (s *soak) restart() {
	s.mu.Lock()
	defer s.mu.Unlock()
	began := time.Now()
	s.node.Start()
	s.slowest = max(s.slowest, time.Since(began))
}

func (s *soak) checkWitnesses() {
	for _, was := range s.witnesses {
		now := s.status(was.Id)
		harness.Want(s.t, now.String() == was.String(), "a pod that was not touched changed:\nwas %v\nis  %v", was, now)
	}
}

// wantNothingListed: each worker has removed its own, and there are no others.
func (s *soak) wantNothingListed() {
	answer, err := s.client().ListPodSandbox(s.ctx, &runtimeapi.ListPodSandboxRequest{})
	harness.Check(s.t, err)
	extra := len(answer.Items) - len(s.witnesses)
	harness.Want(s.t, extra == 0, "%d sandboxes are listed that were not asked for: %v", extra, answer.Items)
}

// soak is what killer and workers share.
type soak struct {
	t         *testing.T
	ctx       context.Context // of calls, until the test's time-out
	node      *nodetest.Node
	before    leak.Snapshot // without a pod
	witnesses []*runtimeapi.PodSandboxStatus
	slowest   time.Duration // start of the daemon

	// world is held by each worker for the life of one pod, and for itself alone by a reboot, which ends all pods.
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

func (s *soak) status(id string) *runtimeapi.PodSandboxStatus {
	answer, err := s.client().PodSandboxStatus(s.ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id})
	harness.Want(s.t, err == nil, "PodSandboxStatus %s: %v", id, err)
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
	options := []nodetest.PodOption{nodetest.Attempt(w.attempt)}
	switch w.random.IntN(4) {
	case 0:
		options = append(options, nodetest.HostNetwork())
	case 1:
		options = append(options, nodetest.UserNamespace)
	case 2:
		options = append(options, nodetest.HostPort(w.port, 80))
	}
	return w.node.PodConfig(w.name, options...)
}

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

func (w *worker) removeListed() {
	for _, pod := range ask(w, "list", runtimeapi.RuntimeServiceClient.ListPodSandbox, &runtimeapi.ListPodSandboxRequest{}).GetItems() {
		if pod.Metadata.Name == w.name {
			w.removePod(pod.Id)
		}
	}
}

// checkReady: the status is that of a pod that can be used, with an address that no other pod has.
func (w *worker) checkReady(id string, config *runtimeapi.PodSandboxConfig) (address string) {
	pod := ask(w, "status", runtimeapi.RuntimeServiceClient.PodSandboxStatus, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id}).GetStatus()
	address = pod.GetNetwork().GetIp()
	onNode := config.Linux.SecurityContext.NamespaceOptions.Network == runtimeapi.NamespaceMode_NODE
	harness.Want(w.t, pod.GetState() == runtimeapi.PodSandboxState_SANDBOX_READY && (address == "") == onNode,
		"a pod that was run is %v", pod)
	other, taken := w.owners.LoadOrStore(address, id)
	harness.Want(w.t, !taken || onNode, "address %s is that of %s and of %v", address, id, other)
	return address
}

func (w *worker) removePod(id string) {
	ask(w, "stop", runtimeapi.RuntimeServiceClient.StopPodSandbox, &runtimeapi.StopPodSandboxRequest{PodSandboxId: id})
	ask(w, "remove", runtimeapi.RuntimeServiceClient.RemovePodSandbox, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id})
}

// ask is until of one call.
func ask[Request, Answer any](
	w *worker, what string,
	rpc func(runtimeapi.RuntimeServiceClient, context.Context, Request, ...grpc.CallOption) (Answer, error), request Request,
) (answer Answer) {
	w.until(what+" "+w.name, func(ctx context.Context) (err error) {
		answer, err = rpc(w.client(), ctx, request)
		return err
	})
	return answer
}

// until repeats a request until it succeeds; each failure has its reason in the daemon's end, in a plugin that was
// told to fail or in the worker's own impatience.
func (w *worker) until(what string, request func(context.Context) error) {
	err := request(w.ctx)
	for ; err != nil && w.ctx.Err() == nil && !w.t.Failed(); err = request(w.ctx) {
		switch status.Code(err) {
		case codes.Unavailable, codes.DeadlineExceeded, codes.AlreadyExists, codes.Canceled: // the last by the harness, which hangs up
		default:
			told := strings.Contains(err.Error(), "CNI ") // a plugin failed or hung, as it was told
			harness.Want(w.t, told, "%s: %v", what, err)
		}
		w.repeats.Add(1)
		time.Sleep(5 * time.Millisecond)
	}
	harness.Check(w.t, err)
}

// limits are short where a worker would wait for them: a plugin that hangs is ended after them, a DEL that failed is
// repeated soon. Bridge does not reach them on a busy machine: ADDs that always end half-way would make no pod, and a
// DEL that is killed half-way leaves its masquerade rules for good (docs/node.md), and the soak is no test of bridge.
const limits = `[limits]
cni_add = "10s"
cni_del = "20s"
retry_first = "50ms"
retry_most = "500ms"
detach_tries = 1000000
detach_time = "1h"
give_up_tries = 4
give_up_time = "0s"
`

// faulty is a plugin that makes nothing. While there is a file "fail", its DEL
// fails with a text that go-cni takes for success; while there is one "hang" it
// hangs, with a child in a session of its own that has nothing of its environment.
const faulty = `#!/bin/sh
cat > /dev/null
if [ -e %[1]s/hang ]; then
	env -i setsid sleep 600 &
	sleep 600
fi
if [ "$CNI_COMMAND" = DEL ] && [ -e %[1]s/fail ]; then
	echo '{"cniVersion": "1.0.0", "code": 11, "msg": "clusterinformations \"default\" not found"}'
	exit 1
fi
if [ "$CNI_COMMAND" = VERSION ]; then
	echo '{"cniVersion": "1.1.0", "supportedVersions": ["1.0.0", "1.1.0"]}'
else
	echo '{"cniVersion": "1.1.0"}'
fi
`

// addFaulty puts the plugin before the others of the chain: its DEL is the last.
func (s *soak) addFaulty() {
	n := s.node
	harness.Check(s.t, os.WriteFile(filepath.Join(n.Plugins, "faulty"), fmt.Appendf(nil, faulty, n.Dir), 0o755))
	portmap := nodetest.Object{"type": "portmap", "capabilities": nodetest.Object{"portMappings": true}, "snat": true}
	n.WriteConflist("10-test.conflist", nodetest.Object{"type": "faulty"}, n.BridgePlugin(), portmap)
}

// orders puts a file that the plugin looks for where it is, for a while.
func (s *soak) order(name string, during time.Duration) {
	file := filepath.Join(s.node.Dir, name)
	harness.Check(s.t, os.WriteFile(file, nil, 0o600))
	time.Sleep(during)
	harness.Check(s.t, os.Remove(file))
}

// misconfigure has a network that can never work in the place of the node's for a while:
// with a range outside of its subnet, or a plugin that is not installed after one that
// is; as another configuration of the same network, or as another network.
func (s *soak) misconfigure(random *rand.Rand) {
	n := s.node
	bridge := n.BridgePlugin()
	network := nodetest.Object{"cniVersion": "1.0.0", "name": n.Network, "plugins": []nodetest.Object{bridge, {"type": "not-installed"}}}
	if random.IntN(2) == 0 {
		bridge["ipam"].(nodetest.Object)["ranges"] = [][]nodetest.Object{{{"subnet": "10.88.0.0/24", "rangeStart": "10.99.0.1"}}}
		network["plugins"] = []nodetest.Object{bridge}
	}
	if random.IntN(2) == 0 {
		network["name"] = n.Network + "-other"
	}
	data, err := json.Marshal(network)
	harness.Check(s.t, err)
	half, file := filepath.Join(n.Dir, "half.conflist"), filepath.Join(n.CNIConf, "00-broken.conflist")
	harness.Check(s.t, os.WriteFile(half, data, 0o600))
	harness.Check(s.t, os.Rename(half, file))
	time.Sleep(time.Duration(random.Int64N(int64(3 * time.Second))))
	harness.Check(s.t, os.Remove(file))
}

type counts struct{ kills, terminations, failures, hangs, misconfigured, reboots int }

func (c counts) String() string {
	return fmt.Sprintf("%d kills, %d SIGTERMs, %d times DELs failed, %d times plugins hung, %d networks that cannot work, %d reboots",
		c.kills, c.terminations, c.failures, c.hangs, c.misconfigured, c.reboots)
}

func (s *soak) strike(random *rand.Rand, c *counts) {
	switch chance := random.IntN(23); {
	case chance < 9:
		c.kills++
		s.node.Kill()
		s.restart()
	case chance < 14:
		c.terminations++
		s.node.Stop()
		s.restart()
	case chance < 17:
		c.failures++
		s.order("fail", time.Duration(random.Int64N(int64(3*time.Second))))
		return
	case chance < 19:
		c.hangs++
		s.order("hang", time.Duration(random.Int64N(int64(2*time.Second))))
		return
	case chance < 22:
		c.misconfigured++
		s.misconfigure(random)
		return
	default:
		c.reboots++
		s.reboot()
	}
	s.checkWitnesses()
}

// reboot waits until the workers have no pod, and reboots the node with pods that are Ready: they are NotReady then,
// over another start too, their addresses come back by themselves, and they can be removed.
func (s *soak) reboot() {
	s.world.Lock()
	defer s.world.Unlock()
	s.node.Reboot()
	s.restart()
	s.node.Kill()
	s.restart()
	for _, was := range s.witnesses {
		if now := s.status(was.Id); now.GetState() != runtimeapi.PodSandboxState_SANDBOX_NOTREADY || now.GetCreatedAt() != was.GetCreatedAt() {
			s.t.Errorf("after a reboot a pod is %v", now)
		}
	}
	harness.Eventually(s.t, "the addresses come back after a reboot", func() bool {
		return len(harness.Glob(s.t, s.node.Addresses, "10.*")) == 0
	})
	for _, was := range s.witnesses {
		s.node.RemovePod(was.Id)
	}
	s.owners.Clear()
	s.runWitnesses()
}
