package container

import (
	"fmt"
	"path/filepath"
	"strconv"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/oci"
	"github.com/minicri/minicri/sandbox"
)

// namespaces are those of the pod that a container joins: the pinned ones, and
// those that pause, or another container, holds.
func (c *creation) namespaces() (n oci.Namespaces, err error) {
	options := c.config.GetLinux().GetSecurityContext().GetNamespaceOptions()
	pod := c.sandbox.Config().GetLinux().GetSecurityContext().GetNamespaceOptions()
	pause := c.sandbox.Facts().Pause
	n.Net, n.User = c.owner.options.Sandboxes.NetnsPath(c.sandbox), c.owner.options.Sandboxes.UsernsPath(c.sandbox)
	if n.Net != "" {
		n.UTS, err = c.join(pause, "uts")
	}
	if err == nil && pod.GetIpc() != runtimeapi.NamespaceMode_NODE {
		n.IPC, err = c.join(pause, "ipc")
	}
	if err != nil {
		return n, err
	}
	switch options.GetPid() {
	case runtimeapi.NamespaceMode_POD:
		if pod.GetPid() != runtimeapi.NamespaceMode_NODE {
			n.PID, err = c.join(pause, "pid")
		}
	case runtimeapi.NamespaceMode_TARGET:
		var target process.Facts
		if target, err = c.owner.target(c.sandbox, options.GetTargetId()); err == nil {
			n.PID, err = c.join(target, "pid")
		}
	}
	return n, err
}

// target is the process whose pid namespace another container asks for.
func (s *Store) target(sb *sandbox.Sandbox, id string) (process.Facts, error) {
	target, err := s.Find(id)
	if err != nil {
		return process.Facts{}, fmt.Errorf("target_id: %w", err)
	}
	if target.SandboxID != sb.ID || target.State() != runtimeapi.ContainerState_CONTAINER_RUNNING {
		return process.Facts{}, fmt.Errorf("target_id: container %s does not run in sandbox %s: %w", target.ID, sb.ID, errdefs.ErrFailedPrecondition)
	}
	return target.Facts().Process, nil
}

// join is the path of a process's namespace, by its pid. The process is held by a
// pidfd until the container has joined: see recheckJoined.
func (c *creation) join(of process.Facts, kind string) (path string, err error) {
	held, err := process.Open(of)
	if err != nil {
		return "", fmt.Errorf("join the %s namespace: %w: %w", kind, err, errdefs.ErrFailedPrecondition)
	}
	c.joined = append(c.joined, held)
	return filepath.Join("/proc", strconv.Itoa(of.PID), "ns", kind), nil
}

// recheckJoined fails if a process whose namespace the container has joined has ended
// meanwhile: its pid may have become that of another, and the namespace the node's.
func (c *creation) recheckJoined() error {
	for _, held := range c.joined {
		if held.Ended() {
			return fmt.Errorf("process %d, whose namespaces it was to join, has ended: %w", held.PID, errdefs.ErrFailedPrecondition)
		}
	}
	return nil
}

func (c *creation) closeJoined() {
	for _, held := range c.joined {
		_ = held.Close() // a descriptor of ours: that cannot fail
	}
}
