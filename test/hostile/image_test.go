package hostile

import (
	"strings"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/hostile/registry"
)

// residentMemory is the daemon's resident memory in bytes.
func residentMemory(t testing.TB, n *harness.Node) int64 {
	t.Helper()
	return int64(harness.ProcKiB(t, n.PID(), "VmRSS")) << 10
}

// attack: images: every manifest of test/hostile/registry, through the daemon: 16 MB of history, 600 layers, 3000 indexes, artifacts, digests that are paths, sizes without end
// held: each refused by name before a layer is fetched, none as an unavailable registry; the daemon grows by less than 64 MiB and keeps nothing
// field: containerd keeps 500 MB for the history and mounts none of 600 layers
func TestSpoiltImagesAreRefused(t *testing.T) {
	n := harness.NewNode(t)
	n.ImportBusybox() // makes the directories of the image store
	content, host := newRegistry(t, n)
	before := residentMemory(t, n)
	for name, word := range content.Spoilt() {
		_, err := pull(t, n, host+"/"+name+":1", nil)
		if err == nil || !strings.Contains(err.Error(), word) || status.Code(err) == codes.Unknown || len(status.Convert(err).Message()) > 1024 {
			t.Errorf("%s: %v, want %q", name, err, word)
		}
	}
	for _, r := range content.Requests() {
		if strings.Contains(r.Path, "passwd") {
			t.Errorf("a digest became a request: %s", r)
		}
	}
	if grown := residentMemory(t, n) - before; grown > 64<<20 {
		t.Errorf("the daemon has grown by %d MiB", grown>>20)
	}
	answer, err := n.Image.ListImages(limited(t), &runtimeapi.ListImagesRequest{})
	check(t, err)
	if len(answer.GetImages()) != 1 {
		t.Errorf("images: %v", answer.GetImages())
	}
}

// attack: images: upper layers that leave out /tmp (1777) and a home (0700), and a user who is not root
// held: both can be written, and the home is still private
func TestUserOfAnImageWithoutParents(t *testing.T) {
	n := harness.NewNode(t)
	n.ImportBusybox() // so that a program is there to be added
	const image = "hostile.example/parents:1"
	n.BuildImage(image, harness.Object{"Env": []string{"PATH=/bin"}, "User": "1000:1000"}, func(l *harness.Layer) {
		n.AddBusybox(l)
		l.Dir("home/bob", 0o700, 1000)
	}, func(l *harness.Layer) {
		l.File("tmp/file", 0o644, 0, "x")
		l.File("home/bob/file", 0o644, 0, "x")
	}, func(l *harness.Layer) {
		l.File("tmp/other", 0o644, 0, "x")
		l.File("home/bob/other", 0o644, 0, "x")
	})
	id := newTenant(t, n, "parents").run("c", func(c *runtimeapi.ContainerConfig) { c.Image.Image = image })
	if code, output := run(t, n, id, "sh", "-c", "touch /tmp/mine /home/bob/mine && stat -c %a:%u /tmp /home/bob"); code != 0 || output != "1777:0\n700:1000\n" {
		t.Errorf("exit code %d: %s", code, output)
	}
}

// attack: images: RemoveImage, ImageStatus, PullImage and ListImages with a runtime handler that the node does not have; annotations of a pod
// held: the handler is refused by name, the annotations change nothing
//
// cri: Image.spec ImageSpec.annotations ImageSpec.runtime_handler
func TestRuntimeHandlerOfImageCalls(t *testing.T) {
	n := harness.NewNode(t)
	n.ImportBusybox() // makes the directories of the image store
	content, host := newRegistry(t, n)
	m := content.Image(ocispec.ImageConfig{}, registry.Layer(registry.File("a", 0o644, "x")))
	content.Manifest("plain:1", m.MediaType, m)
	unknown := &runtimeapi.ImageSpec{Image: host + "/plain:1", RuntimeHandler: "no-such-handler"}
	ctx := limited(t)
	for name, call := range map[string]func() error{
		"pull": func() error {
			_, err := n.Image.PullImage(ctx, &runtimeapi.PullImageRequest{Image: unknown})
			return err
		},
		"status": func() error {
			_, err := n.Image.ImageStatus(ctx, &runtimeapi.ImageStatusRequest{Image: unknown})
			return err
		},
		"remove": func() error {
			_, err := n.Image.RemoveImage(ctx, &runtimeapi.RemoveImageRequest{Image: unknown})
			return err
		},
		"list": func() error {
			_, err := n.Image.ListImages(ctx, &runtimeapi.ListImagesRequest{Filter: &runtimeapi.ImageFilter{Image: unknown}})
			return err
		},
	} {
		if err := call(); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "no-such-handler") {
			t.Errorf("%s: %v", name, err)
		}
	}
	known := &runtimeapi.ImageSpec{Image: host + "/plain:1", RuntimeHandler: "runc", Annotations: map[string]string{"of.the/pod": "x"}}
	_, err := n.Image.PullImage(ctx, &runtimeapi.PullImageRequest{Image: known})
	check(t, err)
	answer, err := n.Image.ImageStatus(ctx, &runtimeapi.ImageStatusRequest{Image: known})
	check(t, err)
	if spec := answer.GetImage().GetSpec(); spec.GetRuntimeHandler() != "" || len(spec.GetAnnotations()) != 0 {
		t.Errorf("Image.spec: %v", spec)
	}
	_, err = n.Image.RemoveImage(ctx, &runtimeapi.RemoveImageRequest{Image: known})
	check(t, err)
}
