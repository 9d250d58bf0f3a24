package container

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

const dataImage = "test.example/data:1"

// importData brings an image of two layers without any program.
func importData(n *nodetest.Node) {
	n.BuildImage(dataImage, nodetest.Object{}, func(l *nodetest.Layer) {
		l.Dir("models", 0o755, 1000)
		l.File("models/small", 0o640, 1000, "small\n")
		l.File("readme", 0o644, 0, "read me\n")
		l.Link("latest", "/models")
		l.Link("outside", "../../../../etc")
	}, func(l *nodetest.Layer) {
		l.Dir("models", 0o755, 1000)
		l.File("models/large", 0o644, 0, "large\n")
	})
}

func imageMount(at string, change ...func(*runtimeapi.Mount)) option {
	image := func(m *runtimeapi.Mount) { m.Image, m.Readonly = &runtimeapi.ImageSpec{Image: dataImage}, true }
	return mounted("", at, append([]func(*runtimeapi.Mount){image}, change...)...)
}

func subPath(path string) func(*runtimeapi.Mount) {
	return func(m *runtimeapi.Mount) { m.ImageSubPath = path }
}

// cri: ImageSpec.image_ref Mount.host_path Mount.image Mount.image_sub_path RemoveImage RemoveImageRequest.image
func TestImageAsAVolume(t *testing.T) {
	n := newNode(t)
	importData(n)
	p := runPod(t, n, "web")
	before := p.Look()
	for _, path := range []string{"no/such", "readme/below", "outside"} {
		wantImageVolumeError(t, p.createErr(shell("app", "true", imageMount("/data", subPath(path)), noLog)), path)
	}
	same(t, "differences", p.Differences(before), nil)
	id := p.run("app", forever, imageMount("/data"), imageMount("/models", subPath("models")), imageMount("/latest", subPath("latest")), imageMount("/file", subPath("models/small")))
	same(t, "content", p.exec(id, "cat /data/readme /models/small /models/large /latest/large /file"), "read me\nsmall\nlarge\nlarge\nsmall")
	same(t, "owners", p.exec(id, "stat -c %u:%a /models /models/small /models/large"), "1000:755\n1000:640\n0:644")
	p.exec(id, "for f in /data/new /models/new /models/small; do (echo x >> $f) 2>/dev/null && exit 1; done; true")
	mounts := p.status(id).Mounts
	expect(t, len(mounts) == 4 && mounts[0].HostPath == "" && mounts[1].ImageSubPath == "models", "mounts in the status: %v", mounts)
	for _, m := range mounts {
		expect(t, m.Image.Image == dataImage && strings.HasPrefix(m.Image.ImageRef, "sha256:"), "image in the status: %v", m.Image)
	}
	// The images can go while they are in use, and the daemon too.
	waits := p.create(shell("waits", "ls /bin/busybox"))
	remove := func(image string) {
		nodetest.Call(t, n.Image.RemoveImage, &runtimeapi.RemoveImageRequest{Image: &runtimeapi.ImageSpec{Image: image}})
	}
	remove(dataImage)
	wantImageVolumeError(t, p.createErr(shell("late", "true", imageMount("/data"))), dataImage)
	remove(nodetest.BusyboxImage)
	n.Crash()
	same(t, "content of images that are gone", p.exec(id, "cat /data/models/large; head -n 1 /etc/passwd"), "large\nroot:x:0:0::/root:/bin/sh")
	check(t, p.start(waits))
	p.wantExit(waits, 0, "Completed")
	check(t, p.remove(id))
}

// wantImageVolumeError: the kubelet looks for the reason at the beginning of the message, in errors of this code.
func wantImageVolumeError(t *testing.T, err error, says string) {
	wantCode(t, err, codes.Unknown, says)
	message := status.Convert(err).Message()
	expect(t, strings.HasPrefix(message, crierrors.ErrImageVolumeMountFailed.Error()+": "), "the message is %q", message)
}

// cri: ContainerConfig.image ImageSpec.image
func TestVolumesOfTheImage(t *testing.T) {
	n := newNode(t)
	const image = "test.example/volumes:1"
	n.BuildImage(image, nodetest.Object{
		"Cmd": []string{"/bin/sh"}, "Env": []string{"PATH=/bin"}, "Volumes": nodetest.Object{"/data": nodetest.Object{}, "/link": nodetest.Object{}, "/absent/here": nodetest.Object{}, "/mounted": nodetest.Object{}},
	}, n.AddBusybox, func(l *nodetest.Layer) {
		l.Dir("data", 0o750, 1000)
		l.Dir("data/sub", 0o700, 1000)
		l.File("data/sub/file", 0o600, 1000, "of the image\n")
		l.Link("data/away", "/etc/passwd")
		l.Link("link", "data/sub")
		l.Dir("mounted", 0o755, 0)
	})
	p := runPod(t, n, "web")
	withVolumes := func(c *runtimeapi.ContainerConfig) { c.Image.Image = image }
	own := t.TempDir()
	check(t, os.WriteFile(filepath.Join(own, "own"), nil, 0o644))
	const look = "cat /data/sub/file /link/file; readlink /data/away; stat -c %u:%g:%a /data /data/sub /data/sub/file; ls /absent/here /mounted"
	const want = "of the image of the image /etc/passwd 1000:1000:750 1000:1000:700 1000:1000:600 /absent/here: /mounted: own"
	id := p.run("app", forever, withVolumes, mounted(own, "/mounted"))
	words := func(text string) string { return strings.Join(strings.Fields(text), " ") }
	same(t, "volumes", words(p.exec(id, look)), want)
	p.exec(id, "echo changed > /data/sub/file; echo new > /absent/here/new")
	// They are no part of the writable layer, and of no other container.
	other := p.run("app", forever, withVolumes, attempt(1), mounted(own, "/mounted"))
	same(t, "volumes of another container", words(p.exec(other, look)), want)
	same(t, "after a write", p.exec(id, "cat /data/sub/file /absent/here/new"), "changed\nnew")
	check(t, p.remove(id))
	check(t, p.remove(other))
	left := harness.Glob(t, n.Root, "container-volumes", "*")
	same(t, "left", left, nil)
}

// A source that the kubelet made and that has gone, a link to nothing, or a place of the kernel's is an error with its
// name, and nothing is made.
func TestMissingSources(t *testing.T) {
	p := newPod(t)
	link := filepath.Join(p.Dir, "link")
	check(t, os.Symlink(filepath.Join(p.Dir, "nowhere"), link))
	volume := filepath.Join(p.Dir, "kubelet", "pods", p.config.Metadata.Uid, "volumes", "kubernetes.io~csi", "data", "mount")
	for _, path := range []string{link, volume, "/dev/minicri-is-missing", "/sys/minicri-is-missing"} {
		wantCode(t, p.createErr(shell("app", "true", mounted(path, "/v"))), codes.FailedPrecondition, path, "/v")
	}
	for _, path := range []string{filepath.Join(p.Dir, "nowhere"), filepath.Join(p.Dir, "kubelet"), "/dev/minicri-is-missing"} {
		_, err := os.Lstat(path)
		expect(t, os.IsNotExist(err), "%s has been made: %v", path, err)
	}
}

// mountOptions are those of the mount on top at a place, as the container sees it.
func (p *pod) mountOptions(id, place string) []string {
	lines := strings.Split(p.exec(id, "grep ' "+place+" ' /proc/self/mountinfo"), "\n")
	return strings.Split(strings.Fields(lines[len(lines)-1])[5], ",")
}

func wantOptions(t *testing.T, what string, got []string, want ...string) {
	for _, option := range want {
		expect(t, slices.Contains(got, option), "%s: the options are %q, want %s", what, got, option)
	}
}

func mountTmpfs(t *testing.T, dir string, flags uintptr) {
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
	host := runPod(t, p.Node, "host", nodeIPC)
	wantOptions(t, "/dev/shm of the node", host.mountOptions(host.run("app", forever), "/dev/shm"), "nosuid", "nodev", "noexec")
}

// A security context without lists of paths hides what is usually hidden.
func TestMaskedByDefault(t *testing.T) {
	p := newPod(t)
	id := p.run("app", forever)
	p.exec(id, "! echo x > /proc/sys/kernel/domainname 2>/dev/null && test -z \"$(cat /proc/keys /proc/timer_list)\" && test -z \"$(ls /sys/firmware)\"")
	p.exec(id, "! mkdir /sys/fs/cgroup/x 2>/dev/null && ! touch /sys/fs/cgroup/y 2>/dev/null")
	wantOptions(t, "/sys/fs/cgroup", p.mountOptions(id, "/sys/fs/cgroup"), "ro", "nosuid", "nodev", "noexec")
	// procMount: Unmasked comes as two empty lists, and needs a user namespace.
	unmasked := runPod(t, p.Node, "unmasked", nodetest.UserNamespace)
	id = unmasked.run("app", forever, pidMode(runtimeapi.NamespaceMode_CONTAINER, ""))
	const masks = "grep -c ' /proc/[a-z]' /proc/self/mountinfo || true"
	same(t, "masks", unmasked.exec(id, masks), "0")
	free := runPod(t, p.Node, "privileged", privilegedPod)
	same(t, "masks of a privileged container", free.exec(free.run("app", forever, privileged), masks), "0")
}

// All mappings of a pod hold for the root of its containers, for volumes and for images that are mounted.
//
// cri: IDMapping.container_id IDMapping.length LinuxContainerSecurityContext.namespace_options
// cri: Mount.gidMappings Mount.uidMappings UserNamespace.gids UserNamespace.mode
func TestSeveralMappings(t *testing.T) {
	n := newNode(t)
	importData(n)
	mappings := nodetest.IDs(0, 300000, 1000, 1000, 500000, 1000, 60000, 700000, 10)
	users := &runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_POD, Uids: mappings, Gids: mappings}
	p := runPod(t, n, "web", func(c *runtimeapi.PodSandboxConfig) { c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = users })
	volume := filepath.Join(p.Dir, "volume")
	check(t, os.Mkdir(volume, 0o777))
	check(t, os.Chmod(volume, 0o777))
	check(t, os.WriteFile(filepath.Join(volume, "file"), nil, 0o644))
	check(t, os.Chown(filepath.Join(volume, "file"), 1000, 60001))
	mapped := func(m *runtimeapi.Mount) { m.UidMappings, m.GidMappings = mappings, mappings }
	id := p.run("app", forever, imageMount("/data", mapped), mounted(volume, "/v", mapped), func(c *runtimeapi.ContainerConfig) {
		c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = users
	})
	wantNamespaces(t, p.info(id).PID, os.Getpid(), false, "user")
	same(t, "who it is", p.exec(id, "id -u; echo x > /bin/new; stat -c %u /bin/new"), "0\n0")
	const owners = "stat -c %u:%g "
	same(t, "root", p.exec(id, owners+"/bin/busybox /home"), "0:0\n1000:1000")
	same(t, "the pod's files", p.exec(id, owners+"/etc/resolv.conf /etc/hosts /etc/hostname"), "0:0\n0:0\n0:0")
	same(t, "volume", p.exec(id, owners+"/v/file"), "1000:60001")
	same(t, "image", p.exec(id, owners+"/data/readme /data/models"), "0:0\n1000:1000")
	p.exec(id, "touch /v/new && chown 60005:1500 /v/new")
	info, err := os.Stat(filepath.Join(volume, "new"))
	check(t, err)
	stat := info.Sys().(*syscall.Stat_t)
	same(t, "owner of the new file on the node", fmt.Sprint(stat.Uid, ":", stat.Gid), "60005:1500")
	same(t, "uid of root on the node", strings.Fields(harness.ProcStatus(t, p.info(id).PID, "Uid"))[0], "300000")
	same(t, "who can be", p.exec(id, "cat /proc/self/uid_map | awk '{print $1\" \"$2\" \"$3}'"), "0 300000 1000\n1000 500000 1000\n60000 700000 10")
}

// Volumes that an image declares but does not have belong to the user of the
// container, with a user namespace and without.
func TestVolumesThatTheImageLacks(t *testing.T) {
	n := newNode(t)
	const image = "test.example/database:1"
	n.BuildImage(image, nodetest.Object{
		"Cmd": []string{"/bin/sh"}, "Env": []string{"PATH=/bin"}, "Volumes": nodetest.Object{"/var/lib/absent": nodetest.Object{}},
	}, n.AddBusybox)
	as := func(uid int64) option {
		return all(asUser(uid), attempt(uint32(uid)), func(c *runtimeapi.ContainerConfig) {
			c.Image.Image, c.Linux.SecurityContext.RunAsGroup = image, &runtimeapi.Int64Value{Value: uid + 1}
		})
	}
	for name, p := range harness.Sorted(map[string]*pod{"plain": runPod(t, n, "plain"), "userns": runPod(t, n, "userns", nodetest.UserNamespace)}) {
		for _, uid := range []int64{0, 1000} {
			owner := p.exec(p.run("app", forever, as(uid)), "echo x > /var/lib/absent/file && stat -c %u:%g /var/lib/absent")
			same(t, name, owner, fmt.Sprint(uid, ":", uid+1))
		}
	}
}

// A pod can have users of its own and the network of the node: /sys is then the node's, read-only.
//
// cri: RuntimeFeatures.user_namespaces_host_network
func TestUserNamespaceInTheNetworkOfTheNode(t *testing.T) {
	n := newNode(t)
	features := nodetest.Call(t, n.Runtime.Status, &runtimeapi.StatusRequest{}).Features
	expect(t, features.UserNamespacesHostNetwork, "the feature is not reported")
	p := runPod(t, n, "web", nodetest.HostNetwork(), nodetest.UserNamespace)
	id := p.run("app", forever)
	pid := p.info(id).PID
	wantNamespaces(t, pid, p.PID(), true, "net", "uts")
	wantNamespaces(t, pid, p.PID(), false, "user", "mnt", "ipc", "pid")
	same(t, "uid on the node", strings.Fields(harness.ProcStatus(t, pid, "Uid"))[0], "200000")
	p.exec(id, "test -e /sys/kernel && test -e /sys/class/net/lo && ! touch /sys/fs/cgroup/x 2>/dev/null")
	wantOptions(t, "/sys", p.mountOptions(id, "/sys"), "ro", "nosuid", "nodev", "noexec")
	// Of several mounts in one place the last is on top.
	writable := p.exec(id, `awk '$5 ~ "^/sys" {top[$5] = $6} END {for (place in top) if (top[place] !~ "^ro") print place}' /proc/self/mountinfo`)
	same(t, "what of /sys can be written to", writable, "")
	check(t, p.remove(id))
}
