// Package namespace owns the network and user namespaces of pods: it creates them, pins them to files, which
// keeps them alive without a process, sets their loopback up, dials into them and removes them.
//
// The path of a pin follows from the directory, the node's mark and the pod's ID. There is no other state and
// no lock: calls for different IDs may be concurrent, and the sandbox's lock serialises those for one.
package namespace

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"github.com/moby/sys/mountinfo"
	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/state"
)

// Dir manages one directory, where bind mounts of the kernel's files pin namespaces (namespaces(7)).
type Dir struct {
	directory string
	mark      string
}

// Open prepares the directory, which others may share: our file names begin with the mark.
//
// Pins have to reach other mount namespaces, and their removal, too: a copy of a pin keeps its namespace alive. On a
// shared mount (systemd shares all) the kernel does that. A mount of our own would hide the pins of other runtimes
// there: they could no longer unmount these, and services in older mount namespaces would not see ours.
func Open(directory, mark string) (*Dir, error) {
	if err := os.MkdirAll(directory, 0o755); err != nil {
		return nil, fmt.Errorf("make the directory for namespaces: %w", err)
	}
	if err := share(directory); err != nil {
		return nil, fmt.Errorf("make %s a shared mount: %w", directory, err)
	}
	return Find(directory, mark), nil
}

// share makes a mount of the directory, as ip-netns(8) does, if its mount is not shared and nobody has a pin in it.
func share(directory string) error {
	err := unix.Mount("", directory, "none", unix.MS_SHARED|unix.MS_REC, "")
	if !errors.Is(err, unix.EINVAL) { // EINVAL: the directory is no mount point
		return err
	}
	real, err := filepath.EvalSymlinks(directory)
	if err != nil {
		return err
	}
	var above *mountinfo.Info // the deepest mount that has the directory; of equals the last, on top
	mounts, err := mountinfo.GetMounts(nil)
	for _, m := range mounts {
		if strings.HasPrefix(m.Mountpoint, real+"/") {
			return nil // hidden below a mount, the pin of another runtime could never be removed
		}
		deepest := above == nil || len(m.Mountpoint) >= len(above.Mountpoint)
		if deepest && strings.HasPrefix(real, strings.TrimSuffix(m.Mountpoint, "/")+"/") {
			above = m
		}
	}
	if err != nil || above != nil && strings.Contains(above.Optional, "shared:") {
		return err
	}
	// In the peer group of its source, each pin would be mounted twice.
	err = unix.Mount(directory, directory, "none", unix.MS_BIND|unix.MS_REC, "")
	for _, propagation := range []uintptr{unix.MS_PRIVATE, unix.MS_SHARED | unix.MS_REC} {
		if err == nil {
			err = unix.Mount("", directory, "none", propagation, "")
		}
	}
	return err
}

// Find is Open for a directory that is prepared.
func Find(directory, mark string) *Dir { return &Dir{directory: directory, mark: mark} }

// Path returns where the namespace of id is or would be pinned.
func (n *Dir) Path(id string) string { return filepath.Join(n.directory, n.mark+id) }

// Create makes a network namespace and pins it.
func (n *Dir) Create(id string) error {
	return process.OnDisposableThread(func() error {
		handle, err := netns.New()
		if err != nil {
			return fmt.Errorf("unshare the network namespace: %w", err)
		}
		defer handle.Close()
		return n.Pin(id, "/proc/thread-self/ns/net")
	})
}

// Pin bind-mounts the namespace file source at the path of id.
func (n *Dir) Pin(id, source string) error {
	path := n.Path(id)
	file, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o444)
	if err != nil {
		return fmt.Errorf("make the file of the namespace: %w", err)
	}
	if err := file.Close(); err != nil {
		return err
	}
	if err := unix.Mount(source, path, "none", unix.MS_BIND, ""); err != nil {
		return errors.Join(fmt.Errorf("bind %s to %s: %w", source, path, err), os.Remove(path))
	}
	return nil
}

// Alive reports whether a namespace is pinned for id; a reboot or a person may have removed it. Where that cannot
// be found out, it is taken to be there.
func (n *Dir) Alive(id string) bool {
	var stat unix.Statfs_t
	if err := unix.Statfs(n.Path(id), &stat); err != nil {
		return !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENOTDIR) && !errors.Is(err, unix.ELOOP)
	}
	return stat.Type == unix.NSFS_MAGIC
}

// Remove removes every pin of id, if any. The kernel frees the namespace when its last process exits.
func (n *Dir) Remove(id string) error {
	path := n.Path(id)
	if err := unmountAll(path); err != nil {
		return fmt.Errorf("unmount the namespace %s: %w", path, err)
	}
	err := state.RemoveAll(path)
	if errors.Is(err, unix.EBUSY) {
		err = n.removeCovered(path)
	}
	if err != nil {
		return fmt.Errorf("remove the namespace file: %w", err)
	}
	return nil
}

// unmountAll unmounts all that is mounted on a path.
func unmountAll(path string) (err error) {
	for err == nil {
		err = unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	}
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// removeCovered removes a file with a pin that a later mount of the directory covers, as the first 'ip netns add' makes
// it. The kernel removes the pins in all mount namespaces if the file is removed in one where nothing is mounted on it.
func (n *Dir) removeCovered(path string) error {
	return process.OnDisposableThread(func() error {
		directory, err := filepath.EvalSymlinks(n.directory)
		if err == nil {
			err = unix.Unshare(unix.CLONE_NEWNS)
		}
		if err == nil {
			err = unix.Mount("", "/", "none", unix.MS_PRIVATE|unix.MS_REC, "")
		}
		if err == nil {
			err = unmountAll(directory)
		}
		if err == nil {
			err = unmountAll(path)
		}
		if err == nil {
			err = os.Remove(path)
		}
		return err
	})
}

// IDs lists the IDs of the namespaces that are pinned under our mark.
func (n *Dir) IDs() ([]string, error) {
	entries, err := os.ReadDir(n.directory)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list the namespaces: %w", err)
	}
	var ids []string
	for _, entry := range entries {
		if id, ours := strings.CutPrefix(entry.Name(), n.mark); ours {
			ids = append(ids, id)
		}
	}
	return ids, nil
}

// Dial connects to an IP address and port from inside the namespace of id. A socket stays in the namespace
// that its thread was in when it was made (network_namespaces(7)).
func (n *Dir) Dial(ctx context.Context, id, network, address string) (connection net.Conn, err error) {
	err = process.OnDisposableThread(func() error {
		handle, err := netns.GetFromPath(n.Path(id))
		if err != nil {
			return fmt.Errorf("open the network namespace: %w", err)
		}
		defer handle.Close()
		if err := netns.Set(handle); err != nil {
			return fmt.Errorf("enter the network namespace: %w", err)
		}
		connection, err = new(net.Dialer).DialContext(ctx, network, address)
		return err
	})
	return connection, err
}

// LoopbackUp sets lo up in the namespace at path; the kernel then gives it 127.0.0.1 and ::1.
func LoopbackUp(path string) error {
	namespace, err := netns.GetFromPath(path)
	if err != nil {
		return fmt.Errorf("open the network namespace %s: %w", path, err)
	}
	defer namespace.Close()
	handle, err := netlink.NewHandleAt(namespace, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open a netlink socket in %s: %w", path, err)
	}
	defer handle.Close()
	lo, err := handle.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find lo in %s: %w", path, err)
	}
	if err := handle.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set lo up in %s: %w", path, err)
	}
	return nil
}

// SetSysctls writes parameters of the network namespace at path, in order: pairs of a path below /proc/sys and a value.
func SetSysctls(path string, values [][2]string) error {
	return process.OnDisposableThread(func() error {
		handle, err := netns.GetFromPath(path)
		if err != nil {
			return fmt.Errorf("open the network namespace %s: %w", path, err)
		}
		defer handle.Close()
		if err := netns.Set(handle); err != nil {
			return fmt.Errorf("enter the network namespace %s: %w", path, err)
		}
		for _, one := range values {
			if err := os.WriteFile("/proc/sys/"+one[0], []byte(one[1]), 0); err != nil {
				return fmt.Errorf("set %s to %q: %w", one[0], one[1], err)
			}
		}
		return nil
	})
}

// Holder is a process that waits in a new user namespace and a new network namespace owned by it until both
// are pinned. One clone(2) makes the user namespace first: it then owns the network namespace, whose sysfs
// only a process privileged in the owner can mount.
type Holder struct {
	command *exec.Cmd
	opened  map[string]*os.File
}

// StartHolder runs the program, which has to wait until it is killed, in new namespaces with the mappings (user_namespaces(7)).
// The holder dies with the daemon: the kernel kills it when its starting thread exits (PR_SET_PDEATHSIG). So
// the calling goroutine keeps its thread until it calls End itself.
func StartHolder(program string, uids, gids []specs.LinuxIDMapping) (*Holder, error) {
	command := exec.Command(program)
	command.Env = []string{}
	command.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:                 unix.CLONE_NEWUSER | unix.CLONE_NEWNET,
		UidMappings:                sysProcMappings(uids),
		GidMappings:                sysProcMappings(gids),
		GidMappingsEnableSetgroups: true,
		Pdeathsig:                  unix.SIGKILL,
	}
	runtime.LockOSThread()
	if err := command.Start(); err != nil {
		runtime.UnlockOSThread()
		return nil, fmt.Errorf("start a process in a new user namespace: %w", err)
	}
	h := &Holder{command: command, opened: make(map[string]*os.File)}
	if err := h.open(); err != nil {
		return nil, errors.Join(err, h.End())
	}
	return h, nil
}

// open opens the namespaces at once: when the holder has exited and is reaped, also by process.ReapOrphans,
// its PID and its path in /proc may belong to any process.
func (h *Holder) open() error {
	for _, kind := range []string{"user", "net"} {
		file, err := os.Open(filepath.Join("/proc", strconv.Itoa(h.command.Process.Pid), "ns", kind))
		if err != nil {
			return fmt.Errorf("open a new %s namespace: %w", kind, err)
		}
		h.opened[kind] = file
	}
	// The pidfd proves that the holder was not reaped until now, and the PID was its own.
	if err := h.command.Process.Signal(syscall.Signal(0)); err != nil {
		return fmt.Errorf("the process in a new user namespace has ended: %w", err)
	}
	return nil
}

func sysProcMappings(mappings []specs.LinuxIDMapping) []syscall.SysProcIDMap {
	var result []syscall.SysProcIDMap
	for _, m := range mappings {
		result = append(result, syscall.SysProcIDMap{ContainerID: int(m.ContainerID), HostID: int(m.HostID), Size: int(m.Size)})
	}
	return result
}

// Namespace is the source for Dir.Pin of the kind "user" or "net" until End, even if the holder has exited.
func (h *Holder) Namespace(kind string) string {
	return fmt.Sprintf("/proc/self/fd/%d", h.opened[kind].Fd())
}

// End kills the holder and waits for it. It does nothing on a nil holder or when called again.
func (h *Holder) End() error {
	if h == nil || h.command == nil {
		return nil
	}
	command := h.command
	h.command = nil
	defer runtime.UnlockOSThread()
	for _, file := range h.opened {
		_ = file.Close() // of an nsfs file, which has nothing to write
	}
	if err := command.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill the process that holds the user namespace: %w", err)
	}
	_ = command.Wait() // it was killed, or ended long ago and was reaped as an orphan
	return nil
}
