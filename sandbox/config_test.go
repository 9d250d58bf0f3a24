package sandbox

import (
	"errors"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/handler"
	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/internal/node"
	"github.com/minicri/minicri/internal/object"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/internal/validate"
	"github.com/minicri/minicri/test/harness"
)

// goodConfig asks for much that a pod can ask for at once.
func goodConfig() *runtimeapi.PodSandboxConfig {
	return &runtimeapi.PodSandboxConfig{
		Metadata: &runtimeapi.PodSandboxMetadata{Name: "web-0", Namespace: "default", Uid: "3f0c-11", Attempt: 1}, Hostname: "web-0.example", LogDirectory: "/var/log/pods/x",
		DnsConfig:    &runtimeapi.DNSConfig{Servers: []string{"10.96.0.10", "fd00::a"}, Searches: []string{"svc.local"}, Options: []string{"ndots:5"}},
		PortMappings: []*runtimeapi.PortMapping{{Protocol: runtimeapi.Protocol_UDP, ContainerPort: 53, HostPort: 65535, HostIp: "127.0.0.1"}, {}},
		Labels:       map[string]string{"app": "web", "": ""}, Annotations: map[string]string{validate.IngressBandwidth: "10M", "any": "thing\n"},
		Linux: &runtimeapi.LinuxPodSandboxConfig{
			CgroupParent: "/kubepods/pod3f0c", Sysctls: map[string]string{"net.core.somaxconn": "512", "kernel.shm_rmid_forced": "1"},
			SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
				RunAsUser: &runtimeapi.Int64Value{Value: 1000}, SupplementalGroups: []int64{0, math.MaxUint32 - 1},
				Seccomp: &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault},
				NamespaceOptions: &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_CONTAINER, UsernsOptions: &runtimeapi.UserNamespace{
					Mode: runtimeapi.NamespaceMode_POD, Uids: ids(0, 65536, 1000, 2000, 100000, 10), Gids: ids(0, 65536, 65536),
				}},
			},
		},
	}
}

// ids makes mappings of container id, host id and length, three by three.
func ids(numbers ...uint32) (mappings []*runtimeapi.IDMapping) {
	for of := range slices.Chunk(numbers, 3) {
		mappings = append(mappings, &runtimeapi.IDMapping{ContainerId: of[0], HostId: of[1], Length: of[2]})
	}
	return mappings
}

func options(c *runtimeapi.PodSandboxConfig) *runtimeapi.NamespaceOption {
	return c.Linux.SecurityContext.NamespaceOptions
}

// checker is a store of no sandboxes, with facts and identity in a directory of
// its own.
func checker(t *testing.T) *Store {
	t.Helper()
	dir := t.TempDir()
	identity, err := node.Open(dir, dir, dir)
	s := &Store{
		Store:   object.NewStore[*Sandbox](t.Context(), "pod sandbox"),
		options: Options{Group: "node", Handlers: handler.New(map[string]handler.Spec{"runc": {}}, handler.Features{UserNamespaces: true}), Machine: machine.Machine{UserNamespaces: true}, Node: identity, Logger: slog.New(slog.DiscardHandler)},
		bootID:  "now",
	}
	files, filesErr := state.OpenObjects[Record, Facts]("sandbox", filepath.Join(dir, "records"), filepath.Join(dir, "facts"), "", s.options.Logger)
	must(t, errors.Join(err, filesErr))
	s.files = files
	return s
}

func wantEmpty(t *testing.T, directories ...string) {
	t.Helper()
	for _, directory := range directories {
		found, err := filepath.Glob(filepath.Join(directory, "*"))
		if err != nil && !errors.Is(err, os.ErrNotExist) || len(found) > 0 {
			t.Errorf("%s is not empty: %q, %v", directory, found, err)
		}
	}
}

func must(t testing.TB, err error) { t.Helper(); harness.Check(t, err) }
