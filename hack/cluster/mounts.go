package main

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// disk are the directories that survive a reboot of a node: directory on the
// node, directory of ours that it is.
var disk = [][2]string{
	{"/var", "var"},
	{"/etc/kubernetes", "etc-kubernetes"},
	{"/etc/cni", "etc-cni"},
	{"/etc/minicri", "etc-minicri"},
	{"/etc/containerd", "etc-containerd"},
	{"/opt/cni/bin", "plugins"},
	{"/usr/local/bin", "bin"},
}

// inVar are directories that programs take for granted.
var inVar = []string{"cache", "lib/kubelet", "lib/minicri", "lib/cni", "lib/etcd", "log/pods", "log/containers", "tmp"}

// expected are the values that a kubelet wants of the whole machine, and sets if
// they differ. The machine is not ours: the node shows what the kubelet wants.
var expected = map[string]string{
	"vm/overcommit_memory": "1", "vm/panic_on_oom": "0",
	"kernel/panic": "10", "kernel/panic_on_oops": "1",
	"kernel/keys/root_maxkeys": "1000000", "kernel/keys/root_maxbytes": "25000000",
}

// mountNode makes the mounts of a node and makes them the only ones of this
// mount namespace. The root is the machine's own root directory, read-only for
// the node by an overlay whose changes are in memory.
func mountNode(n *node) error {
	if err := unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("make the mounts private: %w", err)
	}
	root, err := mountRoot(n.path("mnt"))
	if err != nil {
		return err
	}
	steps := []func() error{
		func() error { return mountDevices(root) },
		func() error { return mountFresh(root) },
		func() error { return mountDisk(root, n.dir()) },
		func() error { return mountCgroups(root) },
		func() error { return writeEtc(root, n) },
		func() error { return showExpected(root) },
		func() error { return pivot(root) },
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	// The kubelet hands on to pods what is mounted later.
	if err := unix.Mount("", "/", "", unix.MS_SHARED|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("make the mounts shared: %w", err)
	}
	return nil
}

func mountRoot(base string) (string, error) {
	if err := mount("tmpfs", base, "tmpfs", 0, "mode=755"); err != nil {
		return "", err
	}
	upper, work, root := filepath.Join(base, "upper"), filepath.Join(base, "work"), filepath.Join(base, "root")
	if err := errors.Join(os.Mkdir(upper, 0o755), os.Mkdir(work, 0o755)); err != nil {
		return "", err
	}
	return root, mount("overlay", root, "overlay", 0, fmt.Sprintf("lowerdir=/,upperdir=%s,workdir=%s", upper, work))
}

// mount makes the directory first.
func mount(source, target, kind string, flags uintptr, options string) error {
	if err := os.MkdirAll(target, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(source, target, kind, flags, options); err != nil {
		return fmt.Errorf("mount %s on %s (%s): %w", source, target, options, err)
	}
	return nil
}

func mountDevices(root string) error {
	return errors.Join(
		mount("/dev", root+"/dev", "", unix.MS_BIND, ""),
		mount("devpts", root+"/dev/pts", "devpts", unix.MS_NOSUID|unix.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620"),
		mount("tmpfs", root+"/dev/shm", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, ""),
	)
}

// mountFresh mounts what ends with the node, or is of its namespaces.
func mountFresh(root string) error {
	const safe = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	return errors.Join(
		mount("tmpfs", root+"/run", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=755"),
		mount("tmpfs", root+"/tmp", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777"),
		mount("sysfs", root+"/sys", "sysfs", safe, ""),
		mount("proc", root+"/proc", "proc", safe, ""),
		// A pod with a user namespace may have a /proc of its own only where one
		// without mounts on its files can be seen; the node's first has some.
		mount("proc", root+"/run/proc", "proc", safe, ""),
	)
}

func mountDisk(root, dir string) error {
	for _, name := range inVar {
		if err := os.MkdirAll(filepath.Join(dir, "var", name), 0o755); err != nil {
			return err
		}
	}
	if err := os.Symlink("/run", filepath.Join(dir, "var/run")); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if err := os.MkdirAll(filepath.Join(dir, "etc-kubernetes/manifests"), 0o755); err != nil {
		return err // the kubelet of a node without static pods looks for it each second
	}
	for _, d := range disk {
		from := filepath.Join(dir, d[1])
		if err := errors.Join(os.MkdirAll(from, 0o755), mount(from, root+d[0], "", unix.MS_BIND, "")); err != nil {
			return err
		}
	}
	return nil
}

// mountCgroups mounts every hierarchy of the machine where it has it, with the
// root of our cgroup namespace as its root.
func mountCgroups(root string) error {
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		return err
	}
	const flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	if len(mounts) > 0 && mounts[0].Mountpoint != "/sys/fs/cgroup" {
		if err := mount("tmpfs", root+"/sys/fs/cgroup", "tmpfs", flags, "mode=755"); err != nil {
			return err
		}
	}
	for _, m := range mounts {
		if err := mount("cgroup", root+m.Mountpoint, m.FSType, flags, controllers(m)); err != nil {
			return err
		}
	}
	return nil
}

// controllers are the mount options that name a version 1 hierarchy.
func controllers(m *mountinfo.Info) string {
	var found []string
	for _, option := range strings.Split(m.VFSOptions, ",") {
		if m.FSType == "cgroup" && option != "rw" && option != "ro" && !strings.HasPrefix(option, "release_agent=") {
			found = append(found, option)
		}
	}
	return strings.Join(found, ",")
}

// writeEtc writes the files of /etc that say which node it is.
func writeEtc(root string, n *node) error {
	files := map[string]string{
		"/etc/hostname":    n.Name + "\n",
		"/etc/hosts":       "127.0.0.1 localhost\n::1 localhost\n" + n.Address + " " + n.Name + "\n",
		"/etc/resolv.conf": "nameserver " + hubAddress + "\n",
		"/etc/machine-id":  fmt.Sprintf("%x\n", sha256.Sum256([]byte(n.cluster.Name+"/"+n.Name)))[:32] + "\n",
	}
	for file, content := range files {
		if err := os.Remove(root + file); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err // it may have been a link to somewhere in /run
		}
		if err := os.WriteFile(root+file, []byte(content), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// showExpected mounts files on sysctls of the machine, and on the id of its boot:
// a node that is rebooted has another one.
func showExpected(root string) error {
	boot, err := os.ReadFile("/proc/sys/kernel/random/uuid")
	if err != nil {
		return err
	}
	files := map[string]string{"kernel/random/boot_id": strings.TrimSpace(string(boot))}
	for name, value := range expected {
		files[name] = value
	}
	for name, value := range files {
		file := filepath.Join(root, "run/sysctl", name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(file, []byte(value+"\n"), 0o644); err != nil {
			return err
		}
		if err := unix.Mount(file, filepath.Join(root, "proc/sys", name), "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("mount on the sysctl %s: %w", name, err)
		}
	}
	return nil
}

// pivot makes root the root directory and lets the machine's go.
func pivot(root string) error {
	if err := unix.Chdir(root); err != nil {
		return err
	}
	// pivot_root(2): with "." twice the old root ends up on the new one.
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("pivot_root to %s: %w", root, err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount the machine's root: %w", err)
	}
	return unix.Chdir("/")
}
