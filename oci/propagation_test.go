package oci

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const (
	private       = runtimeapi.MountPropagation_PROPAGATION_PRIVATE
	hostToPod     = runtimeapi.MountPropagation_PROPAGATION_HOST_TO_CONTAINER
	bidirectional = runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL
)

// With real mounts, in a mount namespace of the test's own.
func TestPropagate(t *testing.T) {
	ownMounts(t)
	dir := t.TempDir()
	for name, flag := range map[string]uintptr{"private": unix.MS_PRIVATE, "shared": unix.MS_SHARED, "slave": unix.MS_SHARED} {
		mountTmpfs(t, filepath.Join(dir, name), flag)
	}
	mountSlaveOf(t, filepath.Join(dir, "slave"))
	// On top of a shared mount, and deeper than one.
	mountTmpfs(t, filepath.Join(dir, "shared", "deep"), unix.MS_PRIVATE)
	for _, test := range []struct {
		source       string
		mode         runtimeapi.MountPropagation
		option, root string
		says         string
	}{
		{"private", private, "rprivate", "", ""},
		{"shared", private, "rprivate", "", ""},
		{"private", hostToPod, "", "", "mount --make-rshared"},
		{"private", bidirectional, "", "", "mount --make-rshared"},
		{"shared", hostToPod, "rslave", "rslave", ""},
		{"shared", bidirectional, "rshared", "rshared", ""},
		{"slave", hostToPod, "rslave", "rslave", ""},
		{"slave", bidirectional, "", "", "propagates nothing"},
		{"shared/deep", hostToPod, "", "", "shared/deep"},
		{"shared/deeper", hostToPod, "rslave", "rslave", ""},
	} {
		source := filepath.Join(dir, test.source)
		spec := &specs.Spec{Linux: &specs.Linux{}}
		option, err := propagate(source, test.mode, spec)
		if test.says != "" {
			if err == nil || !strings.Contains(err.Error(), test.says) {
				t.Errorf("%s, %v: %v, want an error that says %q", test.source, test.mode, err, test.says)
			}
		} else if err != nil || option != test.option || spec.Linux.RootfsPropagation != test.root {
			t.Errorf("%s, %v: option %q, root %q, %v", test.source, test.mode, option, spec.Linux.RootfsPropagation, err)
		}
	}
}

// ownMounts gives this thread, which ends with the test, mounts of its own.
func ownMounts(t *testing.T) {
	t.Helper()
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS); err != nil {
		t.Fatalf("a mount namespace (this test needs root): %v", err)
	}
	must(t, unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
}

func mountTmpfs(t *testing.T, place string, propagation uintptr) {
	t.Helper()
	must(t, os.MkdirAll(place, 0o755))
	must(t, unix.Mount("test", place, "tmpfs", 0, ""))
	t.Cleanup(func() { _ = unix.Unmount(place, unix.MNT_DETACH) })
	must(t, unix.Mount("", place, "", propagation, ""))
}

// mountSlaveOf puts a slave of a shared mount on top of it.
func mountSlaveOf(t *testing.T, place string) {
	t.Helper()
	must(t, unix.Mount(place, place, "", unix.MS_BIND, ""))
	t.Cleanup(func() { _ = unix.Unmount(place, unix.MNT_DETACH) })
	must(t, unix.Mount("", place, "", unix.MS_SLAVE, ""))
}
