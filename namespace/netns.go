// Package namespace owns the network and user namespaces of pods: it creates
// them, keeps them alive without a process by pinning them to files, brings
// their loopback up, dials into them and removes them.
//
// A namespace is found by its pod's id alone: the path of its pin follows from
// the directory, the mark of this node and the id. The package keeps no state
// besides those files and has no lock; the methods of Dir may be called
// concurrently for different ids. Calls for one id are serialised by the
// sandbox's lock.
package namespace

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/state"
)

// Dir are the namespaces that are pinned in one directory: a bind mount
// of the kernel's namespace file keeps a namespace alive without a process in
// it (namespaces(7)). The path follows from the id, so an id is all that is
// needed to find a namespace again or to remove it.
type Dir struct {
	directory string
	mark      string
}

// Open makes the directory ready. The mark begins every file name made here: others
// may have files in the same directory.
//
// The directory becomes a shared mount of its own, as ip-netns(8) makes it:
// otherwise a process with a mount namespace of its own would keep a copy of
// each pin, and the namespace would outlive its removal.
func Open(directory, mark string) (*Dir, error) {
	if err := os.MkdirAll(directory, 0o755); err != nil {
		return nil, fmt.Errorf("make the directory for namespaces: %w", err)
	}
	err := unix.Mount("", directory, "none", unix.MS_SHARED|unix.MS_REC, "")
	if errors.Is(err, unix.EINVAL) { // it is no mount point
		// Private first: the bind is in the peer group of what it was made from, where each
		// pin would be mounted a second time.
		err = unix.Mount(directory, directory, "none", unix.MS_BIND|unix.MS_REC, "")
		for _, propagation := range []uintptr{unix.MS_PRIVATE, unix.MS_SHARED | unix.MS_REC} {
			if err == nil {
				err = unix.Mount("", directory, "none", propagation, "")
			}
		}
	}
	if err != nil {
		return nil, fmt.Errorf("make %s a shared mount: %w", directory, err)
	}
	return Find(directory, mark), nil
}

// Find is Open for a directory that another process made ready.
func Find(directory, mark string) *Dir {
	return &Dir{directory: directory, mark: mark}
}

// Path is where the namespace of id is, or would be, pinned.
func (n *Dir) Path(id string) string {
	return filepath.Join(n.directory, n.mark+id)
}

// Create makes a network namespace and pins it.
func (n *Dir) Create(id string) error {
	return OnDisposableThread(func() error {
		handle, err := netns.New()
		if err != nil {
			return fmt.Errorf("unshare the network namespace: %w", err)
		}
		defer handle.Close()
		return n.Pin(id, "/proc/thread-self/ns/net")
	})
}

// OnDisposableThread calls do on a thread that ends afterwards, because do leaves
// it in another namespace.
func OnDisposableThread(do func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// The main thread never ends. While it is held here, the next
			// goroutine gets another one.
			done <- OnDisposableThread(do)
			runtime.UnlockOSThread()
			return
		}
		// Never unlocked: the Go runtime ends the thread with the goroutine.
		done <- do()
	}()
	return <-done
}

// Pin binds the namespace file at source to the path of id.
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

// Alive reports whether the path of id is a namespace now: it may have been
// unmounted, removed or replaced by hand, or be gone with a reboot. One that cannot
// be looked at is taken for alive.
func (n *Dir) Alive(id string) bool {
	var stat unix.Statfs_t
	err := unix.Statfs(n.Path(id), &stat)
	if err != nil {
		return !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENOTDIR) && !errors.Is(err, unix.ELOOP)
	}
	return stat.Type == unix.NSFS_MAGIC
}

// Remove unmounts and deletes the pin of id, as often as one was put over
// another; what is gone already is no error. The kernel frees the namespace
// when the last process has left it.
func (n *Dir) Remove(id string) error {
	path := n.Path(id)
	var err error
	for err == nil {
		err = unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	}
	if !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("unmount the namespace %s: %w", path, err)
	}
	if err := state.RemoveAll(path); err != nil {
		return fmt.Errorf("remove the namespace file: %w", err)
	}
	return nil
}

// IDs lists whose namespaces are pinned here under our mark.
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

// Dial connects from inside the namespace of id, to an IP address and port:
// a socket belongs to the namespace that its thread was in when it was made
// (network_namespaces(7)), and can be used from any other.
func (n *Dir) Dial(ctx context.Context, id, network, address string) (connection net.Conn, err error) {
	err = OnDisposableThread(func() error {
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

// LoopbackUp sets lo up in the namespace at path; the kernel then gives it
// 127.0.0.1 and ::1.
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
