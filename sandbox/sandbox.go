package sandbox

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/object"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/redact"
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
	pause Process // if it runs
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
	etc := filepath.Join(dir, sb.ID)
	if _, err := os.Lstat(etc); err != nil { // an earlier build has made the pod
		etc = dir
	}
	files := oci.PodFiles{
		Hosts: filepath.Join(etc, hostsFile), Hostname: filepath.Join(etc, hostnameFile), ResolvConf: filepath.Join(etc, resolvFile),
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

// The names of the steps of a pod, in the order of doc.go. "sync" and "files" overlap those up to
// "loopback", "prepare" overlaps "cni add" and "addresses", and "end pause" overlaps "cni del". Undo
// and recovery do those of stop and remove, without "stop containers", "record stopped" and "remove containers".
const (
	stepCheck          step.Name = "pod/check"
	stepReserve        step.Name = "pod/reserve"
	stepRecord         step.Name = "pod/record"
	stepSync           step.Name = "pod/sync"
	stepFiles          step.Name = "pod/files"
	stepUserns         step.Name = "pod/userns"
	stepNetns          step.Name = "pod/netns"
	stepLoopback       step.Name = "pod/loopback"
	stepPrepare        step.Name = "pod/prepare"
	stepAdd            step.Name = "pod/cni add"
	stepAddresses      step.Name = "pod/addresses"
	stepNRIRun         step.Name = "pod/nri run"
	stepStart          step.Name = "pod/start"
	stepNRIUpdate      step.Name = "pod/nri update"
	stepNRIUpdated     step.Name = "pod/nri updated"
	stepStopContainers step.Name = "pod/stop containers"
	stepNRIStop        step.Name = "pod/nri stop"
	stepEndPause       step.Name = "pod/end pause"
	stepDel            step.Name = "pod/cni del"
	stepRemoveNetns    step.Name = "pod/remove netns"
	stepRemoveUserns   step.Name = "pod/remove userns"
	stepUnmountFiles   step.Name = "pod/unmount files"
	stepRecordStopped  step.Name = "pod/record stopped"
	stepRemoveAll      step.Name = "pod/remove containers"
	stepNRIRemove      step.Name = "pod/nri remove"
	stepRemoveFiles    step.Name = "pod/remove files"
	stepRemoveRecord   step.Name = "pod/remove record"
)

func (s *Store) begin(ctx context.Context, sb *Sandbox) *step.Sequence {
	return step.Begin(ctx, s.options.Observe, sb.Rows)
}

// writeFacts writes the facts, with the timeline.
func (s *Store) writeFacts(sb *Sandbox) error {
	facts := *sb.Facts()
	facts.Timeline = sb.Timeline()
	return s.files.Facts.Write(sb.ID, facts)
}

// Names identify the pod in a line of the log, as pairs. The default handler is left out.
func (sb *Sandbox) Names() []any {
	m := sb.config.GetMetadata()
	names := []any{"namespace", m.GetNamespace(), "pod", m.GetName(), "sandbox", sb.ID}
	if sb.RuntimeHandler != "" {
		names = append(names, "handler", sb.RuntimeHandler)
	}
	return names
}

func (s *Store) log(sb *Sandbox) *slog.Logger { return s.options.Logger.With(sb.Names()...) }

// life is a pod for step.Lives.
func life(id string, m *runtimeapi.PodSandboxMetadata, err error, rows []step.Row) step.Life {
	one := step.Life{Kind: "pod", ID: id, Name: m.GetNamespace() + "/" + m.GetName(), Attempt: m.GetAttempt(), End: time.Now(), Rows: rows}
	if err != nil {
		one.Error = err.Error()
	}
	return one
}

// keepLife writes the timeline of a sandbox that is gone, or could not be made.
func (s *Store) keepLife(sb *Sandbox) {
	one := life(sb.ID, sb.config.GetMetadata(), sb.Failure, sb.Timeline())
	if sb.Failure != nil {
		one.Network = redact.JSON(sb.network)
	}
	object.Keep(s.options.Lives, s.log(sb), one)
}

// keepRefused writes the timeline of a pod that was refused before it had an id.
func (s *Store) keepRefused(config *runtimeapi.PodSandboxConfig, timeline *step.Timeline, err error) {
	if m := config.GetMetadata(); m.GetName() != "" {
		object.Keep(s.options.Lives, s.options.Logger, life(step.RefusedID("pod", nameOf(m)), m, err, timeline.Rows()))
	}
}

// NotePull adds an image pull to the timeline of its pod, if any. Without one, only a failed pull is kept.
func (s *Store) NotePull(pod *runtimeapi.PodSandboxConfig, row step.Row) {
	row.Kind = "image"
	if pod.GetMetadata() != nil {
		if sb, is := s.Named(nameOf(pod.GetMetadata())); is && s.Base.Err() == nil {
			sb.Rows.Add(row)
			s.Go(func() { s.keepTimeline(sb) })
			return
		}
	}
	if row.Error != "" {
		object.Keep(s.options.Lives, s.options.Logger, step.Life{
			Kind: "image", ID: step.RefusedID("image", row.Step), Name: row.Step, End: time.Now(), Error: row.Error, Rows: []step.Row{row},
		})
	}
}

// keepTimeline writes the facts, for the next daemon and for minicri timeline when none runs.
func (s *Store) keepTimeline(sb *Sandbox) {
	unlock, err := sb.Acquire(s.Base)
	if err != nil {
		return
	}
	defer unlock()
	if !s.Exists(sb.ID) || sb.Facts().ReadyAt.IsZero() {
		return
	}
	if err := s.writeFacts(sb); err != nil {
		s.log(sb).Warn("the timeline of a pod is not on disk", "err", err)
	}
}
