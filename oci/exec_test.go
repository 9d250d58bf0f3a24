package oci

import (
	"reflect"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestForExec(t *testing.T) {
	spec := &specs.Spec{Process: &specs.Process{
		Args: []string{"/server"}, Cwd: "/app", Env: make([]string, 1, 8), User: specs.User{UID: 7, AdditionalGids: []uint32{8}},
		Capabilities: &specs.LinuxCapabilities{Bounding: []string{"CAP_KILL"}}, NoNewPrivileges: true,
	}}
	spec.Process.Env[0] = "A=1"
	want := *spec.Process
	want.Args = []string{"ls"}
	if got := ForExec(spec, []string{"ls"}, false); !reflect.DeepEqual(*got, want) {
		t.Errorf("ForExec = %+v, want %+v", got, want)
	}
	want.Terminal, want.Env = true, []string{"A=1", "TERM=xterm"}
	if got := ForExec(spec, []string{"ls"}, true); !reflect.DeepEqual(*got, want) {
		t.Errorf("with a terminal: %+v, want %+v", got, want)
	}
	if len(spec.Process.Env) != 1 || spec.Process.Env[:2][1] != "" || spec.Process.Args[0] != "/server" {
		t.Errorf("the container's own process has changed: %+v", spec.Process)
	}
	spec.Process.Env = []string{"TERM=linux"}
	if got := ForExec(spec, []string{"ls"}, true).Env; !reflect.DeepEqual(got, []string{"TERM=linux"}) {
		t.Errorf("the environment is %q", got)
	}
}

func TestUserOf(t *testing.T) {
	spec := &specs.Spec{Process: &specs.Process{User: specs.User{UID: 1, GID: 2, AdditionalGids: []uint32{2, 5}}}}
	got := UserOf(spec).GetLinux()
	want := &runtimeapi.LinuxContainerUser{Uid: 1, Gid: 2, SupplementalGroups: []int64{2, 5}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("UserOf = %v, want %v", got, want)
	}
}
