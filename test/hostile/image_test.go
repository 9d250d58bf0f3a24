package hostile

import (
	"bytes"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/hostile/registry"
)

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
	_, pull := n.Image.PullImage(ctx, &runtimeapi.PullImageRequest{Image: unknown})
	_, look := n.Image.ImageStatus(ctx, &runtimeapi.ImageStatusRequest{Image: unknown})
	_, remove := n.Image.RemoveImage(ctx, &runtimeapi.RemoveImageRequest{Image: unknown})
	_, list := n.Image.ListImages(ctx, &runtimeapi.ListImagesRequest{Filter: &runtimeapi.ImageFilter{Image: unknown}})
	for name, err := range map[string]error{"pull": pull, "status": look, "remove": remove, "list": list} {
		if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "no-such-handler") {
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

// attack: images: a setuid program and a device node, in a layer and in a volume of the image, looked for by a local user of the node who knows every path
// held: not one can be reached; the volume has no device node
// field: CVE-2021-41103 of containerd; its volumes still hold the device nodes
func TestNothingOfAnImageIsReachableOnTheNode(t *testing.T) {
	n := harness.NewNode(t)
	n.ImportBusybox()
	content, host := newRegistry(t, n)
	program, err := os.ReadFile("/bin/busybox")
	check(t, err)
	m := content.Image(
		ocispec.ImageConfig{Env: []string{"PATH=/bin"}, Volumes: map[string]struct{}{"/data": {}}},
		registry.Layer(
			registry.Dir("bin", 0o755, 0), registry.File("bin/sleep", 0o755, string(program)), registry.File("bin/stat", 0o755, string(program)), registry.File("bin/suid", 0o4755, string(program)), registry.Device("mem", 0o666, 1, 1),
			registry.Dir("data", 0o777, 0), registry.File("data/suid", 0o4755, string(program)), registry.Device("data/mem", 0o666, 1, 1),
		))
	content.Manifest("suid:1", m.MediaType, m)
	_, err = pull(t, n, host+"/suid:1", nil)
	check(t, err)
	var found []string
	for name, options := range map[string][]harness.PodOption{"suid": nil, "suid-userns": {harness.UserNamespace}} {
		p := newTenant(t, n, name, options...)
		id := p.run("c", func(c *runtimeapi.ContainerConfig) { c.Image.Image = host + "/suid:1" })
		if code, output := run(t, n, id, "/bin/stat", "-c", "%u:%a", "/bin/suid", "/data"); code != 0 || output != "0:4755\n0:777\n" {
			t.Errorf("%s: the container's own view: %d, %s", name, code, output)
		}
		found = append(found, filepath.Join(n.State, "containers", id, "config.json"))
		_, err := os.Lstat(found[len(found)-1])
		check(t, err) // else it would prove nothing
	}
	found = append(found, dangerous(t, n.Root, n.State)...)
	if len(found) < 2+2*3 {
		t.Fatalf("the attack is not in place: %q", found)
	}
	for _, path := range found {
		if strings.Contains(path, "container-volumes") && strings.HasSuffix(path, "/mem") {
			t.Errorf("a device node was copied into a volume: %s", path)
		}
	}
	if reached := asNobody(t, found); reached != "" {
		t.Errorf("a local user reaches:\n%s", reached)
	}
	_, err = n.Image.RemoveImage(limited(t), &runtimeapi.RemoveImageRequest{Image: &runtimeapi.ImageSpec{Image: host + "/suid:1"}})
	check(t, err)
}

// dangerous finds setuid programs and device nodes. Whiteouts (device 0:0) are
// none.
func dangerous(t testing.TB, roots ...string) (paths []string) {
	t.Helper()
	for _, root := range roots {
		check(t, filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
			if os.IsNotExist(err) {
				return nil
			}
			if err != nil {
				return err
			}
			info, err := entry.Info()
			if err != nil {
				return nil //nolint:nilerr // it is gone
			}
			device := info.Mode()&fs.ModeDevice != 0 && info.Sys().(*syscall.Stat_t).Rdev != 0
			if device || info.Mode()&fs.ModeSetuid != 0 {
				paths = append(paths, path)
			}
			return nil
		}))
	}
	return paths
}

// asNobody returns which of the paths uid 65534 reaches.
func asNobody(t testing.TB, paths []string) string {
	t.Helper()
	command := exec.Command("/bin/sh", "-c", `while read -r path; do [ ! -e "$path" ] || echo "$path"; done`)
	command.Stdin = strings.NewReader(strings.Join(paths, "\n") + "\n")
	command.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	var output bytes.Buffer
	command.Stdout, command.Stderr = &output, &output
	check(t, command.Run())
	return output.String()
}
