package oci

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

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
