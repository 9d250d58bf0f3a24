package sandbox

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/internal/step"
)

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
