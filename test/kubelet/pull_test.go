package kubelet

import (
	"encoding/base64"
	"encoding/json"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync/atomic"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	corev1 "k8s.io/api/core/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/hostile/registry"
)

// private is a registry on the node's loopback that asks for a password, and has
// the image of all containers.
type private struct {
	host    string
	refused atomic.Int32 // requests without the password
}

// servePrivate starts it, and gives the kubelet its password by the file that it
// reads besides the secrets of an API server, which there is none of here. From
// both it makes the same credentials for PullImage.
func (k *kubelet) servePrivate() *private {
	k.t.Helper()
	content := registry.New()
	m := content.Image(ocispec.ImageConfig{Env: []string{"PATH=/bin"}}, layer(k.t))
	content.Manifest("busybox:1", m.MediaType, m)
	p := &private{}
	content.Answer(func(w http.ResponseWriter, r *http.Request) bool {
		if user, password, _ := r.BasicAuth(); user == "user" && password == "s3cret" {
			return false
		}
		p.refused.Add(1)
		w.Header().Set("WWW-Authenticate", `Basic realm="private"`)
		w.WriteHeader(http.StatusUnauthorized)
		return true
	})
	var listener net.Listener
	k.RunInNetns(func() (err error) {
		listener, err = net.Listen("tcp", "127.0.0.1:0")
		return err
	})
	server := &http.Server{Handler: content, ReadHeaderTimeout: patience}
	go func() { _ = server.Serve(listener) }() // until Close
	k.t.Cleanup(func() { _ = server.Close() })
	p.host = listener.Addr().String()
	secret := base64.StdEncoding.EncodeToString([]byte("user:s3cret"))
	data, err := json.Marshal(harness.Object{"auths": harness.Object{p.host: harness.Object{"auth": secret}}})
	check(k.t, err)
	check(k.t, os.WriteFile(filepath.Join(k.path("root"), "config.json"), data, 0o600))
	return p
}

func (k *kubelet) applyPulled(p *private) {
	k.t.Helper()
	pull := func(c *corev1.Container) {
		c.Image, c.ImagePullPolicy = p.host+"/busybox:1", corev1.PullAlways
	}
	k.apply("pulled", containers(shell("app", "true"+forever, pull)))
}

// checkPulled: the pod runs the image that the registry has shown to nobody
// without the password; a client without one does not get it, though it is on the
// node.
func (k *kubelet) checkPulled(p *private) {
	k.t.Helper()
	pod := k.awaitReady("pulled")
	image := p.host + "/busybox:1"
	same(k.t, "image of the pod", status(pod, "app").Image, image)
	if p.refused.Load() == 0 {
		k.t.Error("the registry was never asked without the password")
	}
	if _, err := k.Image.PullImage(limited(k.t), &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: image}}); err == nil {
		k.t.Error("the image was pulled without a password")
	}
}
