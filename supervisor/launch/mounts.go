package launch

import (
	"errors"
	"fmt"
	"os"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/namespace"
)

// launchedRoot is where the root of a pause is mounted in the copy of the empty mount
// namespace, until it is the root.
const launchedRoot = "/root"

// makeEmptyMounts makes a mount namespace with an empty directory and nothing else. A
// launch copies it: a process that is cloned with a mount namespace of its own gets a
// copy of all mounts of the node, of which each pod has some, and has to unmount them
// again.
func makeEmptyMounts() (made *os.File, err error) {
	err = namespace.OnDisposableThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return os.NewSyscallError("unshare", err)
		}
		file, err := os.Open("/proc/thread-self/ns/mnt")
		if err != nil {
			return err
		}
		if err := mountNothingElse(); err != nil {
			return errors.Join(err, file.Close())
		}
		made = file
		return nil
	})
	return made, err
}

// mountNothingElse: /proc is only a directory that every node has.
func mountNothingElse() error {
	const over = "/proc"
	for _, step := range []struct {
		what string
		do   func() error
	}{
		{"make the mounts private", func() error { return unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, "") }},
		{"mount a tmpfs", func() error {
			return unix.Mount("tmpfs", over, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0755")
		}},
		{"enter it", func() error { return unix.Chdir(over) }},
		{"make a directory for roots", func() error { return unix.Mkdir("."+launchedRoot, 0o755) }},
		{"change the root", func() error { return unix.PivotRoot(".", ".") }},
		{"unmount all others", func() error { return unix.Unmount(".", unix.MNT_DETACH) }},
	} {
		if err := step.do(); err != nil {
			return fmt.Errorf("%s: %w", step.what, err)
		}
	}
	return nil
}

// mountFlags are those of options of pauses' mounts (mount(2)).
var mountFlags = map[string]uint64{
	"bind": unix.MS_BIND, "ro": unix.MS_RDONLY, "nosuid": unix.MS_NOSUID, "noexec": unix.MS_NOEXEC, "nodev": unix.MS_NODEV,
}

// flagsOf are those of a mount; known: it has no other options.
func flagsOf(m specs.Mount) (flags uint64, known bool) {
	for _, option := range m.Options {
		flag, ok := mountFlags[option]
		if !ok {
			return 0, false
		}
		flags |= flag
	}
	return flags, true
}

// giveTrees opens what is mounted: the root first, then what is bound, in the order of
// the mounts. It returns the number of the first.
func (a *attempt) giveTrees(spec *specs.Spec) (first uint64, err error) {
	if first, err = a.give(openTree(spec.Root.Path, unix.AT_RECURSIVE)); err != nil {
		return 0, err
	}
	for _, m := range spec.Mounts {
		if m.Type == "proc" {
			continue
		}
		if _, err := a.give(openTree(m.Source, 0)); err != nil {
			return 0, err
		}
	}
	return first, nil
}

// openTree is a copy of what is mounted at a path.
func openTree(path string, flags uint) (*os.File, error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, path, flags|unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return nil, &os.PathError{Op: "open_tree", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

// mountRoot: nothing that is mounted here reaches the node. Everything is the
// node's own below the root; there are no links of others to follow.
func (a *attempt) mountRoot(spec *specs.Spec, tree uint64) {
	attach := func(what, target string) {
		a.add(what, unix.SYS_MOVE_MOUNT, tree, a.text(""), here, a.text(target), unix.MOVE_MOUNT_F_EMPTY_PATH)
		tree++
	}
	attach("mount the root "+spec.Root.Path, launchedRoot)
	// The tree shares what is mounted in it with the node's, where that is shared, and
	// such a mount cannot become the root.
	a.add("make the root's mounts slaves of the node's", unix.SYS_MOUNT, 0, a.text(launchedRoot), 0, unix.MS_SLAVE|unix.MS_REC)
	for _, m := range spec.Mounts {
		target := a.text(launchedRoot + m.Destination)
		flags, _ := flagsOf(m)
		what := "mount " + m.Source + " on " + m.Destination
		if m.Type == "proc" {
			a.add(what, unix.SYS_MOUNT, a.text(m.Source), target, a.text(m.Type), flags)
			continue
		}
		attach(what, launchedRoot+m.Destination)
		a.add("set the options of "+m.Destination, unix.SYS_MOUNT, 0, target, 0, flags|unix.MS_REMOUNT)
	}
}

// changeRoot moves the root over that of the empty mount namespace, which nothing leads
// to from then on: what joins the namespace is in the root, too. pivot_root(2) would look
// at all threads of the node for those that are in the old root, and unmounting that
// would wait for all processors.
func (a *attempt) changeRoot(root string) {
	slash, dot := a.text("/"), a.text(".")
	a.add("enter the root "+root, unix.SYS_CHDIR, a.text(launchedRoot))
	a.add("move it over the empty one", unix.SYS_MOUNT, dot, slash, 0, unix.MS_MOVE)
	a.add("change the root", unix.SYS_CHROOT, dot)
	a.add("enter the new root", unix.SYS_CHDIR, slash)
	a.add("make the mounts private", unix.SYS_MOUNT, 0, slash, 0, unix.MS_PRIVATE|unix.MS_REC)
	a.add("make the root read-only", unix.SYS_MOUNT, 0, slash, 0, unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY)
}
