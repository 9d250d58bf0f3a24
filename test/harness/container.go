package harness

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Container is the configuration of a container of BusyboxImage as a kubelet would send
// it, without a command of its own if there is none.
func Container(name string, command ...string) *runtimeapi.ContainerConfig {
	return &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: name},
		Image:    &runtimeapi.ImageSpec{Image: BusyboxImage},
		Command:  command,
		LogPath:  name + ".log",
		Linux: &runtimeapi.LinuxContainerConfig{
			Resources: &runtimeapi.LinuxContainerResources{},
			SecurityContext: &runtimeapi.LinuxContainerSecurityContext{
				NamespaceOptions: &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_CONTAINER},
			},
		},
	}
}

// CreateContainer makes a container in a pod, and returns its id.
func (n *Node) CreateContainer(pod string, of *runtimeapi.PodSandboxConfig, c *runtimeapi.ContainerConfig) (id string, err error) {
	answer, err := n.Runtime.CreateContainer(Limited(n.t, callTime), &runtimeapi.CreateContainerRequest{PodSandboxId: pod, SandboxConfig: of, Config: c})
	return answer.GetContainerId(), err
}

// RunContainer makes a container and starts it. An error fails the test.
func (n *Node) RunContainer(pod string, of *runtimeapi.PodSandboxConfig, c *runtimeapi.ContainerConfig) (id string) {
	n.t.Helper()
	id, err := n.CreateContainer(pod, of, c)
	n.must("creating container "+c.GetMetadata().GetName(), err)
	_, err = n.Runtime.StartContainer(Limited(n.t, callTime), &runtimeapi.StartContainerRequest{ContainerId: id})
	n.must("starting container "+c.GetMetadata().GetName(), err)
	return id
}

// Hook is a hook of the runtime-spec that is a shell script.
type Hook struct {
	Kind, Script string
	Seconds      int // its time-out, 0 for none
}

// CDIDevice gives the node a device of a vendor's (CDI) that has hooks, until the test
// ends, and returns its name.
func CDIDevice(t testing.TB, hooks ...Hook) (name string) {
	t.Helper()
	const dir = "/var/run/cdi"
	Check(t, os.MkdirAll(dir, 0o755))
	kind := fmt.Sprintf("test%d", time.Now().UnixNano())
	var list []Object
	for _, h := range hooks {
		hook := Object{"hookName": h.Kind, "path": "/bin/sh", "args": []string{"sh", "-c", h.Script}}
		if h.Seconds > 0 {
			hook["timeout"] = h.Seconds
		}
		list = append(list, hook)
	}
	data, err := json.Marshal(Object{
		"cdiVersion": "0.6.0", "kind": "vendor.example/" + kind,
		"devices": []Object{{"name": "0", "containerEdits": Object{"hooks": list}}},
	})
	Check(t, err)
	file := filepath.Join(dir, kind+".json")
	Check(t, os.WriteFile(file, data, 0o644))
	t.Cleanup(func() {
		Check(t, os.Remove(file))
		_ = os.Remove(dir) // if it was ours
	})
	return "vendor.example/" + kind + "=0"
}

// ProcStatus is a field of /proc/PID/status.
func ProcStatus(t testing.TB, pid int, field string) string {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	Check(t, err)
	for line := range strings.Lines(string(data)) {
		if value, found := strings.CutPrefix(line, field+":"); found {
			return strings.TrimSpace(value)
		}
	}
	t.Fatalf("/proc/%d/status has no %s", pid, field)
	return ""
}

// ProcKiB is such a field in KiB.
func ProcKiB(t testing.TB, pid int, field string) (kib int) {
	t.Helper()
	_, err := fmt.Sscanf(ProcStatus(t, pid, field), "%d kB", &kib)
	Check(t, err)
	return kib
}
