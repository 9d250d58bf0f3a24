package container

import (
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/handler"
	"github.com/minicri/minicri/test/harness"
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

// Every signal of the CRI has a number, and that has one name, which is always the same: some have two.
func TestSignalNames(t *testing.T) {
	for value, name := range runtimeapi.Signal_name {
		if value == 0 {
			continue
		}
		number, known := signalNumber(strings.TrimPrefix(name, "SIGNAL_"))
		harness.Want(t, known, "%s has no number", name)
		shown := signalEnum(number)
		for range 20 {
			again := signalEnum(number)
			harness.Need(t, again == shown, "signal %d is %v, and then %v", number, shown, again)
		}
		again, known := signalNumber(strings.TrimPrefix(shown.String(), "SIGNAL_"))
		harness.Want(t, known && again == number, "%s is signal %d, which is shown as %v", name, number, shown)
	}
	harness.Same(t, "signal 0 is shown as", signalEnum(0), runtimeapi.Signal_SIGNAL_RUNTIME_DEFAULT)
}
