package sandbox_test

import (
	"testing"
	"testing/synctest"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/fake"
	"github.com/minicri/minicri/test/harness"
)

func podConfig(name string) *runtimeapi.PodSandboxConfig {
	return &runtimeapi.PodSandboxConfig{
		Metadata: &runtimeapi.PodSandboxMetadata{Name: name, Namespace: "default", Uid: "uid-" + name},
		Linux:    &runtimeapi.LinuxPodSandboxConfig{},
	}
}

func TestLife(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := fake.New(t)
		defer n.End()
		d := n.Start()
		id, err := d.Sandboxes.Run(d.Ctx, podConfig("web"), "")
		harness.Check(t, err)
		harness.Check(t, d.Sandboxes.Stop(d.Ctx, id))
		harness.Check(t, d.Sandboxes.Remove(d.Ctx, id))
		harness.Same(t, "left", n.Leaks(), nil)
	})
}

var hostNetwork = &runtimeapi.LinuxSandboxSecurityContext{
	NamespaceOptions: &runtimeapi.NamespaceOption{Network: runtimeapi.NamespaceMode_NODE},
}

var userNamespace = &runtimeapi.LinuxSandboxSecurityContext{NamespaceOptions: &runtimeapi.NamespaceOption{
	UsernsOptions: &runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_POD, Uids: mapped, Gids: mapped},
}}

var mapped = []*runtimeapi.IDMapping{{HostId: 100000, ContainerId: 0, Length: 65536}}
