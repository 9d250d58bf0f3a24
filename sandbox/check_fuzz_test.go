package sandbox

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/handler"
	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/internal/node"
	"github.com/minicri/minicri/internal/object"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/internal/validate"
	"github.com/minicri/minicri/oci"
	"github.com/minicri/minicri/supervisor/client"
	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

// FuzzCheck: no request makes the check panic or leaves anything behind, what it refuses is InvalidArgument, and
// with what it accepts the later steps that only compute succeed.
func FuzzCheck(f *testing.F) {
	for _, seed := range seeds() {
		data, err := proto.Marshal(seed)
		harness.Check(f, err)
		f.Add(data)
	}
	root, state := f.TempDir(), f.TempDir()
	f.Fuzz(func(t *testing.T, data []byte) {
		request := &runtimeapi.RunPodSandboxRequest{}
		// Fields of a later API are not kept over a restart.
		if (proto.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(data, request) != nil {
			return // gRPC refuses it
		}
		s := checker(t)
		s.options.Root, s.options.State = root, state
		s.options.SystemdCgroup = len(data)%2 == 1
		err := validate.Pod(request.GetConfig(), request.GetRuntimeHandler(), validate.Node{Machine: s.options.Machine, Handlers: s.options.Handlers.Names(), SystemdCgroup: s.options.SystemdCgroup})
		wantEmpty(t, s.options.Root, s.options.State)
		if err != nil {
			harness.Want(t, errdefs.IsInvalidArgument(err), "%v is not InvalidArgument", err)
			return
		}
		wantUsable(t, s, request)
		wantEmpty(t, s.options.Root, s.options.State)
	})
}

func seeds() []*runtimeapi.RunPodSandboxRequest {
	bad := nodetest.GoodPod()
	bad.Metadata.Name, bad.Hostname, bad.LogDirectory = "../x", "a b", "log"
	bad.PortMappings[0].HostPort = -1
	bad.Linux.Sysctls["kernel/panic"] = "\x00"
	options(bad).Network, options(bad).UsernsOptions.Uids = 9, nodetest.IDs(5, 5, 0)
	node := nodetest.GoodPod()
	node.Linux.Sysctls, options(node).UsernsOptions = nil, nil
	options(node).Network, options(node).Ipc, options(node).Pid = 2, 2, 2
	return []*runtimeapi.RunPodSandboxRequest{
		{},
		{Config: &runtimeapi.PodSandboxConfig{Metadata: &runtimeapi.PodSandboxMetadata{Name: "a"}}},
		{Config: nodetest.GoodPod(), RuntimeHandler: "runc"},
		{Config: nodetest.GoodPod(), RuntimeHandler: "kata"},
		{Config: bad},
		{Config: node},
	}
}

func wantUsable(t *testing.T, s *Store, request *runtimeapi.RunPodSandboxRequest) {
	sb, _, err := s.reserve(request.GetConfig(), request.GetRuntimeHandler(), step.NewTimeline(nil))
	harness.Need(t, err == nil && sb != nil, "reserve: %v, %v", sb, err)
	restored, err := object.DecodeConfig(sb.Record.Config, &runtimeapi.PodSandboxConfig{})
	harness.Want(t, err == nil && proto.Equal(restored, request.GetConfig()), "a restart gives another config: %v, %v", restored, err)
	_, err = newAttachment(sb)
	harness.Want(t, err == nil, "attachment: %v", err)
	_, _ = resolvConf(request.GetConfig().GetDnsConfig())
	needsInterfaces(request.GetConfig().GetLinux().GetSysctls())
	// A profile in a file is read when pause is prepared; fuzzing reads none.
	if oci.SeccompOf(sb.config.GetLinux().GetSecurityContext()).GetProfileType() == runtimeapi.SecurityProfile_Localhost {
		return
	}
	_, err = oci.ForSandbox(&oci.Sandbox{ID: sb.ID, Config: sb.config, CgroupsPath: sb.CgroupsPath})
	harness.Want(t, err == nil, "spec: %v", err)
}

func options(c *runtimeapi.PodSandboxConfig) *runtimeapi.NamespaceOption {
	return c.Linux.SecurityContext.NamespaceOptions
}

// checker is a store of no sandboxes, with facts and identity in a directory of its own.
func checker(t *testing.T) *Store {
	dir := t.TempDir()
	identity, err := node.Open(dir, dir, dir)
	s := &Store{
		Store:   object.NewStore[*Sandbox](t.Context(), "pod sandbox"),
		options: Options{Supervisors: &client.Set{}, Handlers: handler.New(map[string]handler.Spec{"runc": {}}, handler.Features{UserNamespaces: true}), Machine: machine.Machine{UserNamespaces: true}, Node: identity, Logger: slog.New(slog.DiscardHandler)},
		bootID:  "now",
	}
	files, filesErr := state.OpenObjects[Record, Facts](t.Context(), "sandbox", filepath.Join(dir, "records"), filepath.Join(dir, "facts"), "", s.options.Logger)
	harness.Check(t, errors.Join(err, filesErr))
	s.files = files
	return s
}

func wantEmpty(t *testing.T, directories ...string) {
	for _, directory := range directories {
		found, err := filepath.Glob(filepath.Join(directory, "*"))
		harness.Want(t, err == nil || errors.Is(err, os.ErrNotExist),
			"%s is not empty: %q, %v", directory, found, err)
		harness.Want(t, len(found) == 0, "%s is not empty: %q, %v", directory, found, err)
	}
}
