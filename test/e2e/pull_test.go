package e2e

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

// TestPullFromARegistry pulls from Debian's docker-registry, over the network: by tag, then by digest.
func TestPullFromARegistry(t *testing.T) {
	const address = "127.0.0.1:5000"
	n := newNode(t)
	startRegistry(t, n, address)
	tag, err := name.ParseReference(address + "/team/app:v1")
	check(t, err)
	image, err := random.Image(4096, 3)
	check(t, err)
	dial := func(context.Context, string, string) (net.Conn, error) { return n.Dial(address) }
	transport := &http.Transport{DialContext: dial, DisableKeepAlives: true}
	check(t, remote.Write(tag, image, remote.WithTransport(transport)))

	id := pull(t, n, tag.String())
	config, err := image.ConfigName()
	check(t, err)
	harness.Same(t, "the image", id, config.String())
	digest, err := image.Digest()
	check(t, err)
	byDigest := address + "/team/app@" + digest.String()
	harness.Same(t, "the image of the digest", pull(t, n, byDigest), id)

	images := nodetest.Call(t, n.Image.ListImages, &runtimeapi.ListImagesRequest{}).Images
	harness.Need(t, len(images) == 1, "want one image, got %v", images)
	harness.Same(t, "its tags", images[0].RepoTags, []string{tag.String()})
	harness.Same(t, "its digests", images[0].RepoDigests, []string{byDigest})
	nodetest.Call(t, n.Image.RemoveImage, &runtimeapi.RemoveImageRequest{Image: &runtimeapi.ImageSpec{Image: id}})

	_, err = n.Image.PullImage(harness.Limited(t), pullRequest(address+"/team/app:v2"))
	nodetest.WantCode(t, err, codes.NotFound, address+"/team/app:v2")
}

func pullRequest(reference string) *runtimeapi.PullImageRequest {
	return &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: reference}}
}

func pull(t *testing.T, n *nodetest.Node, reference string) (id string) {
	return nodetest.Call(t, n.Image.PullImage, pullRequest(reference)).ImageRef
}

// startRegistry serves a registry without content in the node's network namespace until the test ends.
func startRegistry(t *testing.T, n *nodetest.Node, address string) {
	config := filepath.Join(t.TempDir(), "registry.yml")
	content := fmt.Sprintf("version: 0.1\nlog: {level: error, accesslog: {disabled: true}}\nhttp: {addr: %q}\n"+
		"storage: {filesystem: {rootdirectory: %q}}\n", address, t.TempDir())
	check(t, os.WriteFile(config, []byte(content), 0o600))
	var output strings.Builder
	registry := exec.Command("../../bin/debian/usr/bin/docker-registry", "serve", config)
	registry.Stdout, registry.Stderr = &output, &output
	n.RunInNetns(registry.Start)
	ended := make(chan error, 1)
	go func() { ended <- registry.Wait() }()
	t.Cleanup(func() { _ = registry.Process.Kill() })
	harness.Eventually(t, "the registry serves", func() bool {
		select {
		case err := <-ended:
			t.Fatalf("docker-registry: %v: %s", err, output.String())
		default:
		}
		conn, err := n.Dial(address)
		if err == nil {
			_ = conn.Close()
		}
		return err == nil
	})
}
