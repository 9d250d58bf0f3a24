package container

import (
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/minicri/minicri/internal/handler"
)

// A handler with a sandbox for each container refuses what such a one would not share;
// without a word of it the container would run beside what it asks for.
func TestOwnSandboxSharesNothing(t *testing.T) {
	pid, ipc := specs.LinuxNamespace{Type: specs.PIDNamespace}, specs.LinuxNamespace{Type: specs.IPCNamespace, Path: "/proc/1/ns/ipc"}
	ofAnother := specs.LinuxNamespace{Type: specs.PIDNamespace, Path: "/proc/1/ns/pid"}
	for says, namespaces := range map[string][]specs.LinuxNamespace{
		"": {pid, ipc}, "no ipc namespace": {pid}, "no pid namespace": {ipc}, "shares no pid namespace": {ofAnother, ipc},
	} {
		spec := &specs.Spec{Linux: &specs.Linux{Namespaces: namespaces}}
		if err := checkAbility(spec, handler.Status{Spec: handler.Spec{Name: "gvisor"}}); err != nil {
			t.Errorf("%v: %v", namespaces, err)
		}
		err := checkAbility(spec, handler.Status{Spec: handler.Spec{Name: "gvisor", OwnSandbox: true}})
		if (err == nil) != (says == "") || err != nil && (!strings.Contains(err.Error(), says) || !errdefs.IsInvalidArgument(err)) {
			t.Errorf("%v: %v, want %q", namespaces, err, says)
		}
	}
}
