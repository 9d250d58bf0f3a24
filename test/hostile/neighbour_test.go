package hostile

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

const (
	// reference is how long is looked before an attack, for what is usual.
	reference = 4 * time.Second
	// tact is how often something happens in the other pod.
	tact = 100 * time.Millisecond
	// moreThreads is what Go's scheduler may start of its own accord.
	moreThreads = 8
)

// neighbour is the pod of another tenant: things happen in it that no attack may
// delay.
type neighbour struct {
	*tenant
	witness, made string
	number        int
}

func newNeighbour(t testing.TB, n *harness.Node) *neighbour {
	t.Helper()
	p := &neighbour{tenant: newTenant(t, n, "neighbour")}
	p.witness = p.run("witness")
	p.run("writes", command("/bin/sh", "-c", "while sleep 0.05; do echo line; done"))
	p.awaitLog("writes", "line")
	return p
}

func command(words ...string) change {
	return func(c *runtimeapi.ContainerConfig) { c.Command = words }
}

// calls are made in turn, each by its name.
func (p *neighbour) calls() (names []string, calls []func() error) {
	return []string{"exec", "create and start", "log line", "stop and remove"}, []func() error{
		func() error {
			_, err := p.exec(p.witness, 0, "true")
			return err
		},
		func() (err error) {
			p.number++
			if p.made, err = p.create(fmt.Sprint("short", p.number)); err == nil {
				err = p.start(p.made)
			}
			return err
		},
		func() error {
			size := len(p.log("writes"))
			for began := time.Now(); len(p.log("writes")) == size; time.Sleep(time.Millisecond) {
				if time.Since(began) > patience {
					return fmt.Errorf("no line within %v", patience)
				}
			}
			return nil
		},
		func() error {
			if err := p.stop(p.made); err != nil {
				return err
			}
			return p.remove(p.made)
		},
	}
}

// watch makes calls, one after the other, until it is told to end, and says how long the
// slowest of each kind took. After one that fails there is nothing to learn.
func (p *neighbour) watch(end <-chan struct{}) (slowest map[string]time.Duration) {
	slowest = make(map[string]time.Duration)
	names, calls := p.calls()
	ticks := time.NewTicker(tact)
	defer ticks.Stop()
	for ended := false; ; {
		for i, call := range calls {
			began := time.Now()
			err := call()
			slowest[names[i]] = max(slowest[names[i]], time.Since(began))
			if err != nil {
				p.t.Errorf("%s in another pod, after %v: %v", names[i], time.Since(began), err)
				return slowest
			}
			select {
			case <-ticks.C:
			case <-end:
				ended = true
			}
		}
		if ended {
			return slowest
		}
	}
}

// besides makes an attack while things happen in another pod, and fails the test if
// that delays them, costs a supervisor its life or leaves anything with it. target is
// what is attacked, and stays.
func besides(t *testing.T, n *harness.Node, attack func()) {
	t.Helper()
	p := newNeighbour(t, n)
	pause := make(chan struct{})
	time.AfterFunc(reference, func() { close(pause) })
	usual := p.watch(pause)
	if t.Failed() {
		t.Fatal("this failed before the attack")
	}
	pids := supervisors(n)
	node, own := n.Look(), held(t, pids)

	end, watched := make(chan struct{}), make(chan map[string]time.Duration, 1)
	go func() { watched <- p.watch(end) }()
	func() {
		defer close(end)
		attack()
	}()
	during := <-watched
	for _, name := range slices.Sorted(maps.Keys(during)) {
		t.Logf("%s in another pod: at most %v, %v before the attack", name, during[name], usual[name])
		if during[name] > 4*usual[name]+2*time.Second { // a call is slow where system calls are, in a virtual machine
			t.Errorf("%s in another pod took %v, %v before the attack", name, during[name], usual[name])
		}
	}
	if now := supervisors(n); !slices.Equal(now, pids) {
		t.Errorf("the supervisors are %v, before the attack %v", now, pids)
	}
	if !t.Failed() {
		wantNothingLeft(t, n, pids, own)
		for _, left := range n.Differences(node) {
			t.Error(left)
		}
	}
}

// wantNothingLeft waits until supervisors have what they had before.
func wantNothingLeft(t testing.TB, n *harness.Node, pids []int, before holdings) {
	t.Helper()
	after := held(t, pids)
	for began := time.Now(); (after.descriptors > before.descriptors || after.children > before.children) && time.Since(began) < patience/2; {
		after = held(t, pids)
	}
	t.Logf("of the supervisor: before %+v, after %+v", before, after)
	if after.descriptors > before.descriptors || after.children > before.children || after.threads > before.threads+moreThreads {
		t.Errorf("the supervisor has %+v, before the attack %+v", after, before)
	}
}
