package container

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	"github.com/minicri/minicri/test/harness"
)

const dataImage = "test.example/data:1"

// importData brings an image of two layers without any program.
func importData(n *harness.Node) {
	n.BuildImage(dataImage, harness.Object{}, func(l *harness.Layer) {
		l.Dir("models", 0o755, 1000)
		l.File("models/small", 0o640, 1000, "small\n")
		l.File("readme", 0o644, 0, "read me\n")
		l.Link("latest", "/models")
		l.Link("outside", "../../../../etc")
	}, func(l *harness.Layer) {
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
		_, err := p.tryCreate(shell("app", "true", imageMount("/data", subPath(path)), noLog))
		wantImageVolumeError(t, err, path)
	}
	for _, left := range p.Differences(before) {
		t.Error(left)
	}
	id := p.run("app", forever, imageMount("/data"), imageMount("/models", subPath("models")), imageMount("/latest", subPath("latest")), imageMount("/file", subPath("models/small")))
	same(t, "content", p.exec(id, "cat /data/readme /models/small /models/large /latest/large /file"), "read me\nsmall\nlarge\nlarge\nsmall")
	same(t, "owners", strings.Join(strings.Fields(p.exec(id, "stat -c %u:%a /models /models/small /models/large")), " "), "1000:755 1000:640 0:644")
	p.exec(id, "for f in /data/new /models/new /models/small; do (echo x >> $f) 2>/dev/null && exit 1; done; true")
	mounts := p.status(id).Mounts
	if len(mounts) != 4 || mounts[0].HostPath != "" || mounts[1].ImageSubPath != "models" {
		t.Errorf("mounts in the status: %v", mounts)
	}
	for _, m := range mounts {
		if m.Image.Image != dataImage || !strings.HasPrefix(m.Image.ImageRef, "sha256:") {
			t.Errorf("image in the status: %v", m.Image)
		}
	}
	// The images can go while they are in use, and the daemon too.
	waits := p.create(shell("waits", "ls /bin/busybox"))
	remove := func(image string) {
		_, err := n.Image.RemoveImage(limited(t), &runtimeapi.RemoveImageRequest{Image: &runtimeapi.ImageSpec{Image: image}})
		check(t, err)
	}
	remove(dataImage)
	_, err := p.tryCreate(shell("late", "true", imageMount("/data")))
	wantImageVolumeError(t, err, dataImage)
	remove(harness.BusyboxImage)
	n.Kill()
	n.Start()
	same(t, "content of images that are gone", p.exec(id, "cat /data/models/large; head -n 1 /etc/passwd"), "large\nroot:x:0:0::/root:/bin/sh")
	check(t, p.start(waits))
	p.wantExit(waits, 0, "Completed")
	check(t, p.remove(id))
}

// wantImageVolumeError: the kubelet looks for the reason at the beginning of the
// message, in errors of this code.
func wantImageVolumeError(t *testing.T, err error, says string) {
	t.Helper()
	wantCode(t, err, codes.Unknown)
	if message := status.Convert(err).Message(); !strings.HasPrefix(message, crierrors.ErrImageVolumeMountFailed.Error()+": ") || !strings.Contains(message, says) {
		t.Errorf("the message is %q", message)
	}
}

// cri: ContainerConfig.image ImageSpec.image
func TestVolumesOfTheImage(t *testing.T) {
	n := newNode(t)
	const image = "test.example/volumes:1"
	n.BuildImage(image, harness.Object{
		"Cmd": []string{"/bin/sh"}, "Env": []string{"PATH=/bin"}, "Volumes": harness.Object{"/data": harness.Object{}, "/link": harness.Object{}, "/absent/here": harness.Object{}, "/mounted": harness.Object{}},
	}, n.AddBusybox, func(l *harness.Layer) {
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
	for _, one := range []string{id, other} {
		check(t, p.remove(one))
	}
	left, err := filepath.Glob(filepath.Join(n.Root, "container-volumes", "*"))
	check(t, err)
	if len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}
