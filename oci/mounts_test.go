package oci

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

const (
	private       = runtimeapi.MountPropagation_PROPAGATION_PRIVATE
	hostToPod     = runtimeapi.MountPropagation_PROPAGATION_HOST_TO_CONTAINER
	bidirectional = runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL
)

// With real mounts, in a mount namespace of the test's own, whose thread ends with it.
func TestPropagate(t *testing.T) {
	runtime.LockOSThread()
	must(t, errors.Join(unix.Unshare(unix.CLONE_NEWNS|unix.CLONE_FS), unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))) // needs root
	dir := t.TempDir()
	for name, flag := range map[string]uintptr{"private": unix.MS_PRIVATE, "shared": unix.MS_SHARED, "slave": unix.MS_SLAVE} {
		mountTmpfs(t, filepath.Join(dir, name), flag)
	}
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
			harness.Want(t, err != nil && strings.Contains(err.Error(), test.says), "%s, %v: %v, want an error that says %q", test.source, test.mode, err, test.says)
		} else if err != nil || option != test.option || spec.Linux.RootfsPropagation != test.root {
			t.Errorf("%s, %v: option %q, root %q, %v", test.source, test.mode, option, spec.Linux.RootfsPropagation, err)
		}
	}
}

// mountTmpfs mounts one, or, with a propagation of slaves, one that is a slave of a mount below it.
func mountTmpfs(t *testing.T, place string, propagation uintptr) {
	must(t, errors.Join(os.MkdirAll(place, 0o755), unix.Mount("test", place, "tmpfs", 0, "")))
	t.Cleanup(func() { _ = unix.Unmount(place, unix.MNT_DETACH) })
	if propagation == unix.MS_SLAVE {
		must(t, errors.Join(unix.Mount("", place, "", unix.MS_SHARED, ""), unix.Mount(place, place, "", unix.MS_BIND, "")))
		t.Cleanup(func() { _ = unix.Unmount(place, unix.MNT_DETACH) })
	}
	must(t, unix.Mount("", place, "", propagation, ""))
}

// All devices below a directory are given, in their places, and nothing else.
func TestDevicesOfADirectory(t *testing.T) {
	dir := t.TempDir()
	for name, number := range map[string]uint32{"a": uint32(unix.Mkdev(1, 3)), "sub/b": uint32(unix.Mkdev(1, 5)), "pts/c": uint32(unix.Mkdev(1, 7))} {
		path := filepath.Join(dir, name)
		must(t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), unix.Mknod(path, unix.S_IFCHR|0o600, int(number)))) // needs root
	}
	must(t, errors.Join(os.WriteFile(filepath.Join(dir, "file"), nil, 0o600), os.Symlink("a", filepath.Join(dir, "link"))))
	config := &runtimeapi.ContainerConfig{Devices: []*runtimeapi.Device{{HostPath: dir, ContainerPath: "/dev/vendor/", Permissions: "r"}}}
	spec := &specs.Spec{Linux: &specs.Linux{}}
	must(t, containerDevices(&Container{Config: config}, spec))
	var got []string
	for _, device := range spec.Linux.Devices {
		got = append(got, device.Path)
	}
	harness.Want(t, strings.Join(got, " ") == "/dev/vendor/a /dev/vendor/sub/b", "the devices are %q", got)
	harness.Want(t, len(spec.Linux.Resources.Devices) == 3,
		"the rules are %+v, want one to deny all and one for each", spec.Linux.Resources.Devices)
}
