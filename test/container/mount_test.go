package container

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// A source that no one else makes is made. One that the kubelet made and that
// has gone, a link to nothing, or a place of the kernel's is an error with its
// name, and nothing is made.
func TestMissingSources(t *testing.T) {
	p := newPod(t)
	link := filepath.Join(p.Dir, "link")
	check(t, os.Symlink(filepath.Join(p.Dir, "nowhere"), link))
	volume := filepath.Join(p.Dir, "kubelet", "pods", p.config.Metadata.Uid, "volumes", "kubernetes.io~csi", "data", "mount")
	for _, path := range []string{link, volume, "/dev/minicri-is-missing", "/sys/minicri-is-missing"} {
		_, err := p.tryCreate(shell("app", "true", mounted(path, "/v")))
		wantCode(t, err, codes.FailedPrecondition)
		if message := status.Convert(err).Message(); !strings.Contains(message, path) || !strings.Contains(message, "/v") {
			t.Errorf("%s: %s", path, message)
		}
	}
	for _, path := range []string{filepath.Join(p.Dir, "nowhere"), filepath.Join(p.Dir, "kubelet"), "/dev/minicri-is-missing"} {
		if _, err := os.Lstat(path); err == nil {
			t.Errorf("%s has been made", path)
		}
	}
	made := filepath.Join(p.Dir, "host", "path")
	id := p.run("app", forever, mounted(made, "/v"))
	p.exec(id, "echo x > /v/file")
	if _, err := os.Stat(filepath.Join(made, "file")); err != nil {
		t.Error(err)
	}
}

// mountOptions are those of the mount on top at a place, as the container sees it.
func (p *pod) mountOptions(id, place string) []string {
	p.t.Helper()
	lines := strings.Split(p.exec(id, "grep ' "+place+" ' /proc/self/mountinfo"), "\n")
	return strings.Split(strings.Fields(lines[len(lines)-1])[5], ",")
}

func wantOptions(t *testing.T, what string, got []string, want ...string) {
	t.Helper()
	for _, option := range want {
		if !slices.Contains(got, option) {
			t.Errorf("%s: the options are %q, want %s", what, got, option)
		}
	}
}

func mountTmpfs(t *testing.T, dir string, flags uintptr) {
	t.Helper()
	check(t, os.MkdirAll(dir, 0o755))
	check(t, unix.Mount("tmpfs", dir, "tmpfs", flags, ""))
	t.Cleanup(func() { check(t, unix.Unmount(dir, unix.MNT_DETACH)) })
}

// Options of a mount hold for the mounts below its source, too, but a mount that is only
// read-only is not so below; and a source keeps the ones that it has.
//
// cri: Mount.mount_options Mount.readonly Mount.recursive_read_only
func TestMountOptions(t *testing.T) {
	p := newPod(t)
	dir := filepath.Join(p.Dir, "volume")
	mountTmpfs(t, filepath.Join(dir, "sub"), 0)
	strict := filepath.Join(p.Dir, "strict")
	mountTmpfs(t, strict, unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC)
	id := p.run("app", forever, mounted(strict, "/strict"), mounted(dir, "/plain", readonly), mounted(dir, "/deep", readonlyBelow),
		mounted(dir, "/v", func(m *runtimeapi.Mount) { m.MountOptions = []string{"noexec", "nosuid", "nodev"} }))
	for _, place := range []string{"/v", "/v/sub", "/strict", "/dev/shm"} {
		wantOptions(t, place, p.mountOptions(id, place), "nosuid", "nodev", "noexec", "rw")
	}
	p.exec(id, "cp /bin/busybox /v/sub/sh && ! /v/sub/sh true 2>/dev/null; cp /bin/busybox /dev/shm/sh && ! /dev/shm/sh true 2>/dev/null")
	p.exec(id, "! touch /plain/x 2>/dev/null && touch /plain/sub/x")
	p.exec(id, "! touch /deep/x 2>/dev/null && ! touch /deep/sub/y 2>/dev/null && test -e /deep/sub/x")
	host := runPod(t, p.Node, "host", func(c *runtimeapi.PodSandboxConfig) {
		c.Linux.SecurityContext.NamespaceOptions.Ipc = runtimeapi.NamespaceMode_NODE
	})
	wantOptions(t, "/dev/shm of the node", host.mountOptions(host.run("app", forever), "/dev/shm"), "nosuid", "nodev", "noexec")
}

// A security context without lists of paths hides what is usually hidden.
func TestMaskedByDefault(t *testing.T) {
	p := newPod(t)
	id := p.run("app", forever)
	p.exec(id, "! echo x > /proc/sys/kernel/domainname 2>/dev/null; test -z \"$(cat /proc/keys /proc/timer_list)\"; test -z \"$(ls /sys/firmware)\"")
	p.exec(id, "! mkdir /sys/fs/cgroup/x 2>/dev/null; ! touch /sys/fs/cgroup/y 2>/dev/null")
	wantOptions(t, "/sys/fs/cgroup", p.mountOptions(id, "/sys/fs/cgroup"), "ro", "nosuid", "nodev", "noexec")
	// procMount: Unmasked comes as two empty lists, and needs a user namespace.
	unmasked := runPod(t, p.Node, "unmasked", users(ids(0, 300000, 65536)))
	id = unmasked.run("app", forever, func(c *runtimeapi.ContainerConfig) {
		c.Linux.SecurityContext.NamespaceOptions.Pid = runtimeapi.NamespaceMode_CONTAINER
	})
	same(t, "masks", unmasked.exec(id, "grep -c ' /proc/[a-z]' /proc/self/mountinfo || true"), "0")
	free := runPod(t, p.Node, "privileged", privilegedPod)
	id = free.run("app", forever, privileged)
	same(t, "masks of a privileged container", free.exec(id, "grep -c ' /proc/[a-z]' /proc/self/mountinfo || true"), "0")
}
