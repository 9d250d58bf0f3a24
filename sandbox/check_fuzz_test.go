package sandbox

import (
	"testing"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/internal/validate"
	"github.com/minicri/minicri/network"
	"github.com/minicri/minicri/oci"
)

// FuzzCheck: no request makes the check panic or leaves anything behind, what
// it refuses is InvalidArgument, and with what it accepts the later steps that
// only compute succeed.
func FuzzCheck(f *testing.F) {
	for _, seed := range seeds() {
		data, err := proto.Marshal(seed)
		if err != nil {
			f.Fatal(err)
		}
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
			if !errdefs.IsInvalidArgument(err) {
				t.Errorf("%v is not InvalidArgument", err)
			}
			return
		}
		wantUsable(t, s, request)
		wantEmpty(t, s.options.Root, s.options.State)
	})
}

func seeds() []*runtimeapi.RunPodSandboxRequest {
	bad := goodConfig()
	bad.Metadata.Name, bad.Hostname, bad.LogDirectory = "../x", "a b", "log"
	bad.PortMappings[0].HostPort = -1
	bad.Linux.Sysctls["kernel/panic"] = "\x00"
	options(bad).Network, options(bad).UsernsOptions.Uids = 9, ids(5, 5, 0)
	node := goodConfig()
	node.Linux.Sysctls, options(node).UsernsOptions = nil, nil
	options(node).Network, options(node).Ipc, options(node).Pid = 2, 2, 2
	return []*runtimeapi.RunPodSandboxRequest{
		{},
		{Config: &runtimeapi.PodSandboxConfig{Metadata: &runtimeapi.PodSandboxMetadata{Name: "a"}}},
		{Config: goodConfig(), RuntimeHandler: "runc"},
		{Config: goodConfig(), RuntimeHandler: "kata"},
		{Config: bad},
		{Config: node},
	}
}

func wantUsable(t *testing.T, s *Store, request *runtimeapi.RunPodSandboxRequest) {
	t.Helper()
	sb, _, err := s.reserve(request.GetConfig(), request.GetRuntimeHandler(), step.NewTimeline(nil))
	if err != nil || sb == nil {
		t.Fatalf("reserve: %v, %v", sb, err)
	}
	restored, err := sb.decodeConfig()
	if err != nil || !proto.Equal(restored, request.GetConfig()) {
		t.Errorf("a restart gives another config: %v, %v", restored, err)
	}
	if _, err := newAttachment(sb, &network.Configuration{Name: "n", Bytes: []byte("{}")}); err != nil {
		t.Errorf("attachment: %v", err)
	}
	_, _ = resolvConf(request.GetConfig().GetDnsConfig())
	needsInterfaces(request.GetConfig().GetLinux().GetSysctls())
	// A profile in a file is read when pause is prepared; fuzzing reads none.
	if oci.SeccompOf(sb.config.GetLinux().GetSecurityContext()).GetProfileType() == runtimeapi.SecurityProfile_Localhost {
		return
	}
	if _, err := oci.ForSandbox(&oci.Sandbox{ID: sb.ID, Config: sb.config, CgroupsPath: sb.CgroupsPath}); err != nil {
		t.Errorf("spec: %v", err)
	}
}
