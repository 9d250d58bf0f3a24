package kubelet

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/test/harness"
)

// overlaid are the directories in which a kubelet has fixed paths, whatever its
// configuration is: /var/lib/kubelet/device-plugins, /var/log/containers.
var overlaid = []string{"/var/lib", "/var/log"}

// sysctls are what a kubelet makes of the kernel's settings when it starts. In its mount namespace they have these
// values already, so it leaves alone those of the machine, which also would have to be restored.
var sysctls = map[string]string{
	"vm/overcommit_memory":      "1",
	"vm/panic_on_oom":           "0",
	"kernel/panic":              "10",
	"kernel/panic_on_oops":      "1",
	"kernel/keys/root_maxkeys":  "1000000",
	"kernel/keys/root_maxbytes": "25000000",
}

// newMountNamespace makes the kubelet's mount namespace, in which the machine's files are as they are, and what the
// kubelet writes to fixed paths goes to dir. Of the kubelet's mounts only those below shared leave the namespace:
// there are the volumes, which the runtime has to see.
func newMountNamespace(t testing.TB, n *harness.Node, dir, shared string) *os.File {
	harness.Check(t, unix.Mount(shared, shared, "", unix.MS_BIND, ""))
	t.Cleanup(func() { harness.Check(t, unix.Unmount(shared, unix.MNT_DETACH)) })
	harness.Check(t, unix.Mount("", shared, "", unix.MS_SHARED, ""))
	var namespace *os.File
	// The thread that this runs on ends with it.
	n.RunInNetns(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		if err := isolate(dir, shared); err != nil {
			return err
		}
		namespace, err = os.Open("/proc/thread-self/ns/mnt")
		return err
	})
	t.Cleanup(func() { harness.Check(t, namespace.Close()) })
	return namespace
}

func isolate(dir, shared string) error {
	if err := enslaveAllBut(shared); err != nil {
		return err
	}
	// An overlay's upper directory must not be on an overlay, as / often is.
	if err := unix.Mount("kubelet", dir, "tmpfs", 0, ""); err != nil {
		return err
	}
	for _, path := range overlaid {
		if err := overlay(path, filepath.Join(dir, filepath.Base(path))); err != nil {
			return err
		}
	}
	for name, value := range sysctls {
		file := filepath.Join(dir, strings.ReplaceAll(name, "/", "."))
		err := os.WriteFile(file, []byte(value+"\n"), 0o400)
		if err = errors.Join(err, unix.Mount(file, filepath.Join("/proc/sys", name), "", unix.MS_BIND, "")); err != nil {
			return fmt.Errorf("hiding %s: %w", name, err)
		}
	}
	return nil
}

// enslaveAllBut makes mounts slaves: what is mounted and unmounted outside is so here, too, and nothing goes back.
func enslaveAllBut(shared string) error {
	mounts, err := mountinfo.GetMounts(nil)
	if err != nil {
		return err
	}
	for _, m := range mounts {
		if m.Mountpoint != shared {
			err = errors.Join(err, os.NewSyscallError("making a slave of "+m.Mountpoint, unix.Mount("", m.Mountpoint, "", unix.MS_SLAVE, "")))
		}
	}
	return err
}

func overlay(path, dir string) error {
	upper, work := filepath.Join(dir, "upper"), filepath.Join(dir, "work")
	if err := errors.Join(os.MkdirAll(upper, 0o755), os.MkdirAll(work, 0o755)); err != nil {
		return err
	}
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", path, upper, work)
	return os.NewSyscallError("an overlay on "+path, unix.Mount("overlay", path, "overlay", 0, options))
}
