package sandbox

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/namespace"
	"github.com/minicri/minicri/network"
	"github.com/minicri/minicri/supervisor/client"
)

// Supervisors run the pause processes, one supervisor for each build. client.Set implements it.
type Supervisors interface {
	Own() string
	Known(build string) error
	Older(pods map[string]int) ([]client.Supervisor, error)
	Ensure(ctx context.Context, build string) (*client.Client, error)
	Call(ctx context.Context, build string, do func(*client.Client) error) (repeated bool, err error)
	Delete(ctx context.Context, build, id string) error
	End(ctx context.Context, build string) error
}

// Networks attach pods. network.CNI implements it.
type Networks interface {
	AttachIn(ctx context.Context, confDir string, a network.Attachment, netns string) (network.Result, error)
	Detach(ctx context.Context, id, netns string) error
	NamespacePath(id string) string
	Attached(id string) bool
	KnowAttached(id string)
	Release(id string)
	ReleaseUnknown(exists func(id string) bool)
}

// Namespaces pin the namespaces of one kind, by the id of the pod. namespace.Dir implements it.
type Namespaces interface {
	Path(id string) string
	Create(id string) error
	Pin(id, source string) error
	Alive(id string) bool
	Remove(id string) error
}

// Cgroups end processes. cgroup.Hierarchies implements it.
type Cgroups interface {
	Exists(path string) bool
	Processes(path string) ([]int, error)
	Remove(path string, limit time.Duration) error
}

// Process is a process that runs, or has just ended. process.Process implements it.
type Process interface {
	Wait() error
	Ended() bool
	Kill(limit time.Duration) error
	Reap()
	Close() error
}

// Holder keeps new namespaces until they are pinned. namespace.Holder implements it.
type Holder interface {
	Namespace(kind string) string
	End() error
}

// Kernel has the privileged calls of pods and containers. NodeKernel implements it.
type Kernel interface {
	// OpenProcess returns process.ErrGone if no process has these facts.
	OpenProcess(facts process.Facts) (Process, error)
	StartHolder(program string, uids, gids []specs.LinuxIDMapping) (Holder, error)
	LoopbackUp(netns string) error
	SetSysctls(netns string, values [][2]string) error
	MountTmpfs(source, target, options string) error
	Unmount(target string) error
	Chown(path string, uid, gid int) error
}

// NodeKernel is the kernel of this node.
type NodeKernel struct{}

// OpenProcess implements Kernel.
func (NodeKernel) OpenProcess(facts process.Facts) (Process, error) {
	opened, err := process.Open(facts)
	if err != nil {
		return nil, err
	}
	return opened, nil
}

// StartHolder implements Kernel.
func (NodeKernel) StartHolder(program string, uids, gids []specs.LinuxIDMapping) (Holder, error) {
	holder, err := namespace.StartHolder(program, uids, gids)
	if err != nil {
		return nil, err
	}
	return holder, nil
}

// LoopbackUp implements Kernel.
func (NodeKernel) LoopbackUp(netns string) error { return namespace.LoopbackUp(netns) }

// SetSysctls implements Kernel.
func (NodeKernel) SetSysctls(netns string, values [][2]string) error {
	return namespace.SetSysctls(netns, values)
}

// MountTmpfs implements Kernel.
func (NodeKernel) MountTmpfs(source, target, options string) error {
	return unix.Mount(source, target, "tmpfs", unix.MS_NOEXEC|unix.MS_NOSUID|unix.MS_NODEV, options)
}

// Unmount implements Kernel. A target that is no mount is EINVAL, a missing one ENOENT.
func (NodeKernel) Unmount(target string) error {
	err := unix.Unmount(target, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	if err != nil {
		return fmt.Errorf("unmount %s: %w", target, err)
	}
	return nil
}

// Chown implements Kernel.
func (NodeKernel) Chown(path string, uid, gid int) error { return os.Chown(path, uid, gid) }
