package sandbox

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/lock"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/state"
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

// The schema versions of the files on disk.
const (
	recordVersion = 1
	factsVersion  = 1
)

// Record is what a sandbox was made from. It is written once, durably, before
// anything else of the sandbox exists; every path that is made follows from
// it, so it is enough to remove everything.
type Record struct {
	ID             string `json:"id"`
	RuntimeHandler string `json:"runtime_handler,omitempty"`
	// DefaultHandler is the handler that "" stood for when the sandbox was made, so that
	// all its containers have one, whatever the default is later. It is "" where another
	// one was asked for, and in records of builds that did not keep it.
	DefaultHandler string `json:"default_handler,omitempty"`
	// Supervisor is the group of the supervisor of its processes: the build that it
	// was made with.
	Supervisor string `json:"supervisor"`
	// CreatedAt is in nanoseconds since 1970, and larger than that of every
	// sandbox made before, whatever the clock does.
	CreatedAt int64 `json:"created_at"`
	// CgroupsPath is kept because the driver may be another one later.
	CgroupsPath string `json:"cgroups_path"`
	// Config is the CRI's PodSandboxConfig, as JSON.
	Config json.RawMessage `json:"config"`
}

// Facts are what was made of a sandbox. They are true until the next boot.
type Facts struct {
	// BootID is the boot in which they hold (/proc/sys/kernel/random/boot_id).
	BootID string `json:"boot_id"`
	// ReadyAt is when pause was started, zero before.
	ReadyAt time.Time     `json:"ready_at,omitzero"`
	Pause   process.Facts `json:"pause,omitzero"`
	// Addresses of eth0, the primary one first; none for the host network.
	Addresses []netip.Addr `json:"addresses,omitempty"`
	// CNIResult are the results of ADD as the plugins gave them.
	CNIResult json.RawMessage `json:"cni_result,omitempty"`
	// Updated are the pod's resources since UpdateResources, nil before.
	Updated *Resources `json:"updated,omitempty"`
	// Timeline is on disk only; in memory the sandbox has it.
	Timeline []step.Row `json:"timeline,omitempty"`
	// ExitedAt is when pause was seen to have ended, StoppedAt when Stop had
	// removed everything but the files.
	ExitedAt  time.Time `json:"exited_at,omitzero"`
	StoppedAt time.Time `json:"stopped_at,omitzero"`
}

// Ready reports whether the sandbox can run containers.
func (f *Facts) Ready() bool {
	return !f.ReadyAt.IsZero() && f.ExitedAt.IsZero() && f.StoppedAt.IsZero()
}

// Handler is the name of the handler that runs the containers of the sandbox.
func (r *Record) Handler() string { return cmp.Or(r.RuntimeHandler, r.DefaultHandler) }

func newRecord(id string, config *runtimeapi.PodSandboxConfig, handler string) (Record, error) {
	encoded, err := protojson.Marshal(config)
	if err != nil {
		return Record{}, fmt.Errorf("encode the config: %w", err)
	}
	return Record{ID: id, RuntimeHandler: handler, Config: encoded}, nil
}

func (r *Record) decodeConfig() (*runtimeapi.PodSandboxConfig, error) {
	config := &runtimeapi.PodSandboxConfig{}
	// A later daemon may have stored fields that this one does not know.
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(r.Config, config); err != nil {
		return nil, fmt.Errorf("decode the config: %w", err)
	}
	if config.GetMetadata() == nil {
		return nil, fmt.Errorf("decode the config: it has no metadata")
	}
	return config, nil
}

// nameOf is what makes a sandbox unique: a pod has one sandbox per attempt. None
// of the names has a slash.
func nameOf(m *runtimeapi.PodSandboxMetadata) string {
	return fmt.Sprintf("%s/%s/%s/%d", m.GetName(), m.GetNamespace(), m.GetUid(), m.GetAttempt())
}

// RetryRecord and RetryFacts put a file in quarantine back if it can be decoded;
// see state.Retry.
func RetryRecord(path string) error { return state.Retry[Record](path, recordVersion) }

// RetryFacts is the same for facts.
func RetryFacts(path string) error { return state.Retry[Facts](path, factsVersion) }

// Details are what a person wants to know of a sandbox, beyond its facts.
type Details struct {
	NetnsPath   string
	NetnsClosed bool
	// RuntimeSpec is the config.json of pause, "null" when it is gone.
	RuntimeSpec []byte
}

// Details looks at the kernel and the files, now.
func (s *Store) Details(sb *Sandbox) Details {
	details := Details{RuntimeSpec: []byte("null")}
	if !sb.hostNetwork() {
		details.NetnsPath = s.options.Netns.Path(sb.ID)
		details.NetnsClosed = !s.options.Netns.Alive(sb.ID)
	}
	if spec, err := os.ReadFile(filepath.Join(s.Dir(sb.ID), "config.json")); err == nil {
		details.RuntimeSpec = spec
	}
	return details
}

// LiveAddresses are the addresses of the sandbox if the namespace that they
// are in is still there: one may have been removed by hand.
func (s *Store) LiveAddresses(sb *Sandbox) []netip.Addr {
	addresses := sb.Addresses()
	if len(addresses) == 0 || !s.options.Netns.Alive(sb.ID) {
		return nil
	}
	return addresses
}

// NetnsPath is where the sandbox's network namespace is pinned, "" for that of
// the node.
func (s *Store) NetnsPath(sb *Sandbox) string {
	if sb.hostNetwork() {
		return ""
	}
	return s.options.Netns.Path(sb.ID)
}

// UsernsPath is where the sandbox's user namespace is pinned, "" for that of
// the node.
func (s *Store) UsernsPath(sb *Sandbox) string {
	if oci.UserNamespace(sb.config) == nil {
		return ""
	}
	return s.options.Userns.Path(sb.ID)
}

// PodFiles are the host paths of what the containers of the sandbox share.
func (s *Store) PodFiles(sb *Sandbox) oci.PodFiles {
	dir := s.Dir(sb.ID)
	files := oci.PodFiles{
		Hosts: filepath.Join(dir, hostsFile), Hostname: filepath.Join(dir, hostnameFile), ResolvConf: filepath.Join(dir, resolvFile),
		Shm: filepath.Join(dir, shmDir),
	}
	if sb.config.GetLinux().GetSecurityContext().GetNamespaceOptions().GetIpc() == runtimeapi.NamespaceMode_NODE {
		files.Shm = "/dev/shm"
	}
	return files
}

// Hostname is what the containers of the sandbox find as their host's name. It is
// not read from their /etc/hostname, which they may write to.
func (s *Store) Hostname(sb *Sandbox) string {
	name, err := hostnameOf(sb.config)
	if err != nil {
		return sb.config.GetHostname()
	}
	return name
}
