package sandbox

import (
	"context"
	"fmt"
	"net/netip"
	"sync/atomic"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/lock"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/oci"
)

// Sandbox is one pod sandbox.
type Sandbox struct {
	Record
	config *runtimeapi.PodSandboxConfig

	// facts are replaced, never changed, under the lock.
	facts    atomic.Pointer[Facts]
	timeline *step.Timeline
	// network is the configuration that ADD is given, for the timeline; nil for
	// the host network, and after a restart of the daemon.
	network []byte
	// failure is why it could not be made, nil if it was; only under the lock.
	failure error
	// listed is set once clients may see the sandbox: after Run succeeded, or
	// when what Run left could not be destroyed.
	listed atomic.Bool

	// built is closed when Run has ended, with runErr set before.
	built  chan struct{}
	runErr error

	// lock is held by every operation that changes the sandbox.
	lock lock.Mutex
	// listSize is what it takes in the list of all, without texts, in bytes.
	listSize int
	// pause is the running pause process; only under the lock.
	pause *process.Process
	// unserved is set when no supervisor served as pause was to be deleted from it.
	// Only under the lock.
	unserved bool
	// announced is set once plugins know of the sandbox, those that come later too;
	// stopAnnounced once they were notified that it stops. Only under the lock.
	announced, stopAnnounced bool
}

func newSandbox(record Record, config *runtimeapi.PodSandboxConfig) *Sandbox {
	sb := &Sandbox{Record: record, config: config, timeline: step.NewTimeline(nil), built: make(chan struct{}), lock: lock.New(), listSize: listSize(record, config)}
	sb.facts.Store(&Facts{})
	return sb
}

// acquire takes the sandbox's lock, or gives up with the context.
func (sb *Sandbox) acquire(ctx context.Context) (unlock func(), err error) {
	if err := sb.lock.Lock(ctx); err != nil {
		return nil, fmt.Errorf("wait for another operation on sandbox %s: %w", sb.ID, err)
	}
	return sb.lock.Unlock, nil
}

// Group is that of the sandbox's supervisor.
func (sb *Sandbox) Group() string { return sb.Supervisor }

func (sb *Sandbox) hostNetwork() bool { return oci.HostNetwork(sb.config) }

// Config is what the sandbox was made from. It must not be changed.
func (sb *Sandbox) Config() *runtimeapi.PodSandboxConfig { return sb.config }

// Facts are what is known of the sandbox now. They must not be changed.
func (sb *Sandbox) Facts() *Facts { return sb.facts.Load() }

// Ready reports whether the sandbox can run containers.
func (sb *Sandbox) Ready() bool { return sb.Facts().Ready() }

// Addresses are those of eth0, none for the host network.
func (sb *Sandbox) Addresses() []netip.Addr { return sb.Facts().Addresses }

// update replaces the facts; the lock is held.
func (sb *Sandbox) update(change func(*Facts)) *Facts {
	next := *sb.facts.Load()
	change(&next)
	sb.facts.Store(&next)
	return &next
}
