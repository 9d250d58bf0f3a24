package sandbox

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"path/filepath"
	"time"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/object"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/oci"
)

// Sandbox is one pod sandbox.
type Sandbox struct {
	Record
	object.Object[Facts]
	config *runtimeapi.PodSandboxConfig
	// network is ADD's configuration, for the timeline; nil for the host network and after a restart.
	network []byte
	// built is closed when Run has ended; runErr is set before.
	built  chan struct{}
	runErr error

	// The rest is used under the lock only.
	pause *process.Process // if it runs
	// announced is set once plugins, even later ones, know of the sandbox, stopAnnounced of its end.
	announced, stopAnnounced bool
}

func newSandbox(record Record, config *runtimeapi.PodSandboxConfig) *Sandbox {
	sb := &Sandbox{Record: record, config: config, built: make(chan struct{})}
	const framing = 8 // the item's own tag and length in the list
	size := framing + proto.Size(&runtimeapi.PodSandbox{
		Id: record.ID, Metadata: config.GetMetadata(), CreatedAt: time.Now().UnixNano(), State: runtimeapi.PodSandboxState_SANDBOX_NOTREADY,
		RuntimeHandler: record.RuntimeHandler,
	})
	sb.Init("pod sandbox", object.Key{ID: record.ID, Name: nameOf(config.GetMetadata()), Created: record.CreatedAt, Size: size})
	return sb
}

func (sb *Sandbox) hostNetwork() bool { return oci.HostNetwork(sb.config) }

// Config is what the sandbox was made from. It is read-only.
func (sb *Sandbox) Config() *runtimeapi.PodSandboxConfig { return sb.config }

// Ready reports whether the sandbox can run containers.
func (sb *Sandbox) Ready() bool { return sb.Facts().Ready() }

// Addresses are those of eth0; none for the host network.
func (sb *Sandbox) Addresses() []netip.Addr { return sb.Facts().Addresses }

// Stage is the step under way, or nil.
func (sb *Sandbox) Stage() *step.Row { return sb.Rows.Stage() }

// Record is what a sandbox was made from. It is written once, durably, before anything else of the
// sandbox exists. Every path follows from it, so it is enough to remove everything.
type Record struct {
	ID             string `json:"id"`
	RuntimeHandler string `json:"runtime_handler,omitempty"`
	// DefaultHandler is what "" stood for at the creation, for all containers of the sandbox.
	DefaultHandler string `json:"default_handler,omitempty"`
	Supervisor     string `json:"supervisor"` // the group of its supervisor, which names a build
	// CreatedAt is in nanoseconds since 1970, and later than all others, even if the clock jumps back.
	CreatedAt   int64           `json:"created_at"`
	CgroupsPath string          `json:"cgroups_path"` // kept because the cgroup driver may change
	Config      json.RawMessage `json:"config"`       // the CRI's PodSandboxConfig
}

// Facts are what was made of a sandbox. They hold until the next boot.
type Facts struct {
	BootID    string          `json:"boot_id"`           // of this boot (/proc/sys/kernel/random/boot_id)
	ReadyAt   time.Time       `json:"ready_at,omitzero"` // when pause was started, or zero
	Pause     process.Facts   `json:"pause,omitzero"`
	Addresses []netip.Addr    `json:"addresses,omitempty"`  // of eth0, the primary one first
	CNIResult json.RawMessage `json:"cni_result,omitempty"` // the results of ADD, as the plugins gave them
	Updated   *Resources      `json:"updated,omitempty"`    // by UpdateResources; nil before
	Timeline  []step.Row      `json:"timeline,omitempty"`   // on disk only
	// ExitedAt is when the end of pause was noticed, StoppedAt when Stop had removed all but the files.
	ExitedAt  time.Time `json:"exited_at,omitzero"`
	StoppedAt time.Time `json:"stopped_at,omitzero"`
}

// Ready reports whether the sandbox can run containers.
func (f *Facts) Ready() bool {
	return !f.ReadyAt.IsZero() && f.ExitedAt.IsZero() && f.StoppedAt.IsZero()
}

// Handler names the handler that runs the containers of the sandbox.
func (r *Record) Handler() string { return cmp.Or(r.RuntimeHandler, r.DefaultHandler) }

// nameOf returns what is unique to a sandbox: a pod has one per attempt. No name has a slash.
func nameOf(m *runtimeapi.PodSandboxMetadata) string {
	return fmt.Sprintf("%s/%s/%s/%d", m.GetName(), m.GetNamespace(), m.GetUid(), m.GetAttempt())
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

// Hostname is the host name in the containers. It ignores /etc/hostname, which they may write to.
func (s *Store) Hostname(sb *Sandbox) string {
	name, err := hostnameOf(sb.config)
	if err != nil {
		return sb.config.GetHostname()
	}
	return name
}
