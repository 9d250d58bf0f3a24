package container

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/handler"
	"github.com/minicri/minicri/sandbox"
	"github.com/minicri/minicri/test/harness"
)

// A file of an image is found as a process in it would find it, and what is no file is refused without being opened.
func TestReadInRootfs(t *testing.T) {
	const text = "root:x:0:0::/:/bin/sh\n"
	for _, test := range []struct {
		name string
		make func(t *testing.T, rootfs string)
		want string
		// says is in the error, "" for none.
		says string
	}{
		{"a file", func(t *testing.T, rootfs string) { write(t, rootfs+"/etc/passwd", text) }, text, ""},
		{"nothing", func(*testing.T, string) {}, "", ""},
		{"links, also absolute ones and such that lead up", func(t *testing.T, rootfs string) {
			write(t, rootfs+"/usr/lib/passwd", text)
			link(t, "/usr/lib/other", rootfs+"/etc/passwd")
			link(t, "../../../../usr/lib/passwd", rootfs+"/usr/lib/other")
		}, text, ""},
		{"a link that would lead out", func(t *testing.T, rootfs string) {
			write(t, filepath.Dir(rootfs)+"/outside", text)
			link(t, filepath.Dir(rootfs)+"/outside", rootfs+"/etc/passwd")
		}, "", ""},
		{"a directory", func(t *testing.T, rootfs string) { write(t, rootfs+"/etc/passwd/x", "") }, "", "is not a file"},
		{"a link that never ends", func(t *testing.T, rootfs string) { link(t, "passwd", rootfs+"/etc/passwd") }, "", "too many levels"},
		{"a file of more than 1 MiB", func(t *testing.T, rootfs string) {
			write(t, rootfs+"/etc/passwd", strings.Repeat("x", longestRootfsFile+1))
		}, "", "is not a file of at most 1048576 bytes"},
		{"a pipe", func(t *testing.T, rootfs string) { harness.Check(t, unix.Mkfifo(rootfs+"/etc/passwd", 0o600)) }, "", "is not a file"},
		// Linux has no driver for this number: opening it says ENXIO or ENODEV.
		{"a device", func(t *testing.T, rootfs string) {
			harness.Check(t, unix.Mknod(rootfs+"/etc/passwd", unix.S_IFCHR|0o600, int(unix.Mkdev(240, 250))))
		}, "", "is not a file"},
	} {
		t.Run(test.name, func(t *testing.T) {
			rootfs := filepath.Join(t.TempDir(), "rootfs")
			harness.Check(t, os.MkdirAll(rootfs+"/etc", 0o755))
			test.make(t, rootfs)
			got, err := readInRootfs(rootfs, "etc/passwd")
			harness.Want(t, string(got) == test.want,
				"got %q, %v, want %q and an error that says %q", got, err, test.want, test.says)
			harness.Want(t, (err != nil) == (test.says != ""),
				"got %q, %v, want %q and an error that says %q", got, err, test.want, test.says)
			harness.Want(t, err == nil || strings.Contains(err.Error(), test.says),
				"got %q, %v, want %q and an error that says %q", got, err, test.want, test.says)
		})
	}
}

// Two mounts of images at one path do not give their files to those that follow.
func TestSourcesOfImageMounts(t *testing.T) {
	s := &Store{options: Options{Options: sandbox.Options{State: t.TempDir()}}}
	config := &runtimeapi.ContainerConfig{}
	for i, at := range []string{"/a", "/a", "/b"} {
		harness.Check(t, os.MkdirAll(s.imageDir("id", i), 0o700))
		config.Mounts = append(config.Mounts, &runtimeapi.Mount{ContainerPath: at, Image: &runtimeapi.ImageSpec{}})
	}
	sources, err := (&creation{owner: s, Container: newContainer(Record{ID: "id"}, config)}).imageSources()
	want := s.imageDir("id", 2)
	harness.Want(t, err == nil && sources["/b"] == want, "%v, %v, want %s", sources, err, want)
}

func write(t *testing.T, name, text string) {
	harness.Check(t, errors.Join(os.MkdirAll(filepath.Dir(name), 0o755), os.WriteFile(name, []byte(text), 0o644)))
}

func link(t *testing.T, target, name string) {
	harness.Check(t, errors.Join(os.MkdirAll(filepath.Dir(name), 0o755), os.Symlink(target, name)))
}

// A handler with a sandbox for each container refuses what such a one would not share;
// without a word of it the container would run beside what it asks for.
func TestOwnSandboxSharesNothing(t *testing.T) {
	pid, ipc := specs.LinuxNamespace{Type: specs.PIDNamespace}, specs.LinuxNamespace{Type: specs.IPCNamespace, Path: "/proc/1/ns/ipc"}
	ofAnother := specs.LinuxNamespace{Type: specs.PIDNamespace, Path: "/proc/1/ns/pid"}
	for says, namespaces := range map[string][]specs.LinuxNamespace{
		"": {pid, ipc}, "no ipc namespace": {pid}, "no pid namespace": {ipc}, "shares no pid namespace": {ofAnother, ipc},
	} {
		spec := &specs.Spec{Linux: &specs.Linux{Namespaces: namespaces}}
		err := checkAbility(spec, handler.Status{Spec: handler.Spec{Name: "gvisor"}})
		harness.Want(t, err == nil, "%v: %v", namespaces, err)
		err = checkAbility(spec, handler.Status{Spec: handler.Spec{Name: "gvisor", OwnSandbox: true}})
		harness.Want(t, (err == nil) == (says == ""), "%v: %v, want %q", namespaces, err, says)
		harness.Want(t, err == nil || strings.Contains(err.Error(), says) && errdefs.IsInvalidArgument(err),
			"%v: %v, want %q", namespaces, err, says)
	}
}

// Every signal of the CRI has a number, and that has one name, which is always the same: some have two.
func TestSignalNames(t *testing.T) {
	for value, name := range runtimeapi.Signal_name {
		if value == 0 {
			continue
		}
		number, known := signalNumber(strings.TrimPrefix(name, "SIGNAL_"))
		harness.Want(t, known, "%s has no number", name)
		shown := signalEnum(number)
		for range 20 {
			again := signalEnum(number)
			harness.Need(t, again == shown, "signal %d is %v, and then %v", number, shown, again)
		}
		again, known := signalNumber(strings.TrimPrefix(shown.String(), "SIGNAL_"))
		harness.Want(t, known && again == number, "%s is signal %d, which is shown as %v", name, number, shown)
	}
	harness.Same(t, "signal 0 is shown as", signalEnum(0), runtimeapi.Signal_SIGNAL_RUNTIME_DEFAULT)
}
