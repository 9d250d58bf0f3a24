package sandbox

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"path/filepath"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
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

	// network is the configuration that ADD is given, for the timeline; nil for
	// the host network, and after a restart of the daemon.
	network []byte

	// built is closed when Run has ended, with runErr set before.
	built  chan struct{}
	runErr error

	// What follows is only used under the lock.

	// pause is the running pause process.
	pause *process.Process
	// announced is set once plugins know of the sandbox, those that come later too;
	// stopAnnounced once they were notified that it stops.
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

// Config is what the sandbox was made from. It must not be changed.
func (sb *Sandbox) Config() *runtimeapi.PodSandboxConfig { return sb.config }

// Ready reports whether the sandbox can run containers.
func (sb *Sandbox) Ready() bool { return sb.Facts().Ready() }

// Addresses are those of eth0, none for the host network.
func (sb *Sandbox) Addresses() []netip.Addr { return sb.Facts().Addresses }

// Stage is the step that is under way, nil if none is.
func (sb *Sandbox) Stage() *step.Row { return sb.Rows.Stage() }

// Record is what a sandbox was made from. It is written once, durably, before
// anything else of the sandbox exists; every path that is made follows from
// it, so it is enough to remove everything.
type Record struct {
	ID             string `json:"id"`
	RuntimeHandler string `json:"runtime_handler,omitempty"`
	// DefaultHandler is the handler that "" stood for when the sandbox was made: all its
	// containers have one, whatever the default is later.
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
