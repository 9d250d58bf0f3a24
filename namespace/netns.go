package namespace

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"

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
	if err := makeShared(directory); err != nil {
		return nil, fmt.Errorf("make %s a shared mount: %w", directory, err)
	}
	return Find(directory, mark), nil
}

// Find is Open for a directory that another process made ready.
func Find(directory, mark string) *Dir {
	return &Dir{directory: directory, mark: mark}
}

func makeShared(directory string) error {
	err := unix.Mount("", directory, "none", unix.MS_SHARED|unix.MS_REC, "")
	if !errors.Is(err, unix.EINVAL) { // EINVAL: not a mount point
		return err
	}
	if err := unix.Mount(directory, directory, "none", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return err
	}
	// Private first: the bind is in the peer group of what it was made from, where each
	// pin would be mounted a second time.
	if err := unix.Mount("", directory, "none", unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	return unix.Mount("", directory, "none", unix.MS_SHARED|unix.MS_REC, "")
}

// Path is where the namespace of id is, or would be, pinned.
func (n *Dir) Path(id string) string {
	return filepath.Join(n.directory, n.mark+id)
}

// Create makes a network namespace and pins it.
func (n *Dir) Create(id string) error {
	return OnDisposableThread(func() error { return n.unshareAndPin(id) })
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

func (n *Dir) unshareAndPin(id string) error {
	handle, err := netns.New()
	if err != nil {
		return fmt.Errorf("unshare the network namespace: %w", err)
	}
	defer handle.Close()
	return n.Pin(id, "/proc/thread-self/ns/net")
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
	for {
		err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			break
		}
		if err != nil {
			return fmt.Errorf("unmount the namespace %s: %w", path, err)
		}
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
