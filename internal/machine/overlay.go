package machine

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// mappedRoot is the node's uid for root in the probe's user namespace.
const mappedRoot = 65534

// probeMappedOverlay mounts an overlay whose lower layer has mapped owners, as
// for a container's root: Linux can do that since 5.19, with most but not with
// all file systems (mount_setattr(2), MOUNT_ATTR_IDMAP). It does so in a mount
// namespace that ends with its thread, and writes nothing to root.
func probeMappedOverlay(root string) error {
	for _, err := os.Stat(root); err != nil && root != filepath.Dir(root); _, err = os.Stat(root) {
		root = filepath.Dir(root) // the nearest that is there
	}
	tree, err := mappedTree(root)
	if err != nil {
		return err
	}
	defer unix.Close(tree)
	return onOwnThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return fmt.Errorf("make a mount namespace: %w", err)
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return fmt.Errorf("make mounts private: %w", err)
		}
		return mountMappedOverlay(tree, os.TempDir())
	})
}

// onOwnThread does something to a thread that is not used afterwards. The
// main thread never ends, so it is not that one.
func onOwnThread(do func() error) error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() != os.Getpid() {
			result <- do() // still locked: the thread ends with this goroutine
			return
		}
		err := onOwnThread(do)
		runtime.UnlockOSThread()
		result <- err
	}()
	return <-result
}

// mountMappedOverlay works in a tmpfs of its own.
func mountMappedOverlay(tree int, dir string) error {
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=755"); err != nil {
		return fmt.Errorf("mount a tmpfs: %w", err)
	}
	lower, mapped, merged := filepath.Join(dir, "lower"), filepath.Join(dir, "mapped"), filepath.Join(dir, "merged")
	if err := errors.Join(os.Mkdir(lower, 0o755), os.Mkdir(mapped, 0o755), os.Mkdir(merged, 0o755)); err != nil {
		return err
	}
	if err := unix.MoveMount(tree, "", unix.AT_FDCWD, mapped, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("move_mount: %w", err)
	}
	// Without an upper layer there have to be two lower ones.
	if err := unix.Mount("overlay", merged, "overlay", unix.MS_RDONLY, "lowerdir="+mapped+":"+lower); err != nil {
		return fmt.Errorf("mount an overlay with mapped owners: %w", err)
	}
	var stat unix.Stat_t
	if err := unix.Stat(merged, &stat); err != nil || stat.Uid != mappedRoot {
		return errors.Join(fmt.Errorf("an overlay with mapped owners shows %d instead of %d", stat.Uid, mappedRoot), err)
	}
	return nil
}

// mappedTree is a directory as a mount of its own, with root's files mapped.
func mappedTree(dir string) (tree int, err error) {
	userns, err := openUserns()
	if err != nil {
		return -1, fmt.Errorf("make a user namespace: %w", err)
	}
	defer userns.Close()
	tree, err = unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("open_tree: %w", err)
	}
	attributes := &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(userns.Fd())}
	if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, attributes); err != nil {
		return -1, errors.Join(fmt.Errorf("map the owners of files of %s: %w", dir, err), unix.Close(tree))
	}
	return tree, nil
}

// openUserns opens a new user namespace. Its process is traced, so it stops at its exec, and is
// killed there.
func openUserns() (_ *os.File, err error) {
	runtime.LockOSThread() // the process is killed with the thread that starts it
	defer runtime.UnlockOSThread()
	mapping := []syscall.SysProcIDMap{{ContainerID: 0, HostID: mappedRoot, Size: 1}}
	process, err := os.StartProcess("/proc/self/exe", []string{"minicri-probe"}, &os.ProcAttr{Sys: &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWUSER, UidMappings: mapping, GidMappings: mapping, Ptrace: true, Pdeathsig: unix.SIGKILL,
	}})
	if err != nil {
		return nil, err
	}
	defer func() {
		killErr := process.Kill()
		_, waitErr := process.Wait()
		err = errors.Join(err, killErr, waitErr)
	}()
	return os.Open(fmt.Sprintf("/proc/%d/ns/user", process.Pid))
}
