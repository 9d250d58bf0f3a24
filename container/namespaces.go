package container

import (
	"fmt"
	"path/filepath"
	"strconv"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/oci"
	"github.com/minicri/minicri/sandbox"
)

// namespaces are those of the pod that a container joins: the pinned ones, and
// those that pause holds.
func (s *Store) namespaces(sb *sandbox.Sandbox, config *runtimeapi.ContainerConfig) (oci.Namespaces, error) {
	options := config.GetLinux().GetSecurityContext().GetNamespaceOptions()
	pod := sb.Config().GetLinux().GetSecurityContext().GetNamespaceOptions()
	pause := sb.Facts().Pause.PID
	n := oci.Namespaces{
		Net:  s.options.Sandboxes.NetnsPath(sb),
		User: s.options.Sandboxes.UsernsPath(sb),
	}
	if n.Net != "" {
		n.UTS = namespaceOf(pause, "uts")
	}
	if pod.GetIpc() != runtimeapi.NamespaceMode_NODE {
		n.IPC = namespaceOf(pause, "ipc")
	}
	switch options.GetPid() {
	case runtimeapi.NamespaceMode_POD:
		if pod.GetPid() != runtimeapi.NamespaceMode_NODE {
			n.PID = namespaceOf(pause, "pid")
		}
	case runtimeapi.NamespaceMode_TARGET:
		target, err := s.target(sb, options.GetTargetId())
		if err != nil {
			return n, err
		}
		n.PID = namespaceOf(target, "pid")
	}
	return n, nil
}

// target is the process whose pid namespace another container asks for.
func (s *Store) target(sb *sandbox.Sandbox, id string) (pid int, err error) {
	target, err := s.Find(id)
	if err != nil {
		return 0, fmt.Errorf("target_id: %w", err)
	}
	if target.SandboxID != sb.ID || target.State() != runtimeapi.ContainerState_CONTAINER_RUNNING {
		return 0, fmt.Errorf("target_id: container %s does not run in sandbox %s: %w", target.ID, sb.ID, errdefs.ErrFailedPrecondition)
	}
	return target.Facts().Process.PID, nil
}

func namespaceOf(pid int, kind string) string {
	return filepath.Join("/proc", strconv.Itoa(pid), "ns", kind)
}
