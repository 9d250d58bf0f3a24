package soak

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

func TestMain(m *testing.M) { os.Exit(harness.Main(m)) }

// workers are so many that the machine is busy and the daemon is never idle.
const workers = 6

// longestLife is the most that passes between two strikes.
const longestLife = 2 * time.Second

// strikesAtOnce is after how many strikes pods have to come and go before the next:
// on a busy machine a pod takes longer than the daemon lives, and what the one
// daemon leaves partially created is all that the next one does.
const strikesAtOnce = 4

func TestSoak(t *testing.T) {
	duration, err := time.ParseDuration(cmp.Or(os.Getenv("SOAK"), "20s"))
	check(t, err)
	seed, err := strconv.ParseUint(cmp.Or(os.Getenv("SEED"), strconv.FormatUint(rand.Uint64(), 10)), 10, 64)
	check(t, err)
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

// newSoak makes a node with pods that have to stay Ready all the time.
func newSoak(t *testing.T) *soak {
	s := &soak{t: t, node: harness.NewNode(t, harness.PortMap(), harness.Config(limits))}
	s.addFaulty()
	s.before = s.node.Look()
	s.runWitnesses()
	return s
}

func (s *soak) runWitnesses() {
	s.witnesses = nil
	for _, config := range []*runtimeapi.PodSandboxConfig{
		s.node.PodConfig("stays"), s.node.PodConfig("stays-userns", harness.UserNamespace), s.node.PodConfig("stays-host", harness.HostNetwork()),
	} {
		id := s.node.RunPod(config)
		s.witnesses = append(s.witnesses, s.status(id))
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

// checkWitnesses: whatever happens, a pod that is Ready stays as it is.
func (s *soak) checkWitnesses() {
	for _, was := range s.witnesses {
		if now := s.status(was.Id); now.String() != was.String() {
			s.t.Errorf("a pod that was not touched changed:\nwas %v\nis  %v", was, now)
		}
	}
}

// wantNothingListed: each worker has removed its own, and there are no others.
func (s *soak) wantNothingListed() {
	answer, err := s.client().ListPodSandbox(s.limited(), &runtimeapi.ListPodSandboxRequest{})
	check(s.t, err)
	if extra := len(answer.Items) - len(s.witnesses); extra != 0 {
		s.t.Errorf("%d sandboxes are listed that were not asked for: %v", extra, answer.Items)
	}
}

func check(t testing.TB, err error) {
	t.Helper()
	harness.Check(t, err)
}
