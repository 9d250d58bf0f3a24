package hostile

import (
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/hostile/registry"
)

// attack: registries: through the daemon: a registry that redirects blobs to a store which refuses a second way to authenticate, for a pod with a registry token; a store that asks for the pod's password
// held: the first is pulled, the second is shown nothing
func TestCredentialsStayWithTheirRegistry(t *testing.T) {
	n := harness.NewNode(t)
	n.ImportBusybox() // makes the directories of the image store
	content, host := newRegistry(t, n)
	m := content.Image(ocispec.ImageConfig{}, registry.Layer(registry.File("a", 0o644, "x")))
	content.Manifest("redirected:1", m.MediaType, m)
	var leaked, asks atomic.Bool
	store := serve(t, n, "127.0.0.2:0", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Header.Get("Authorization") != "":
			leaked.Store(true)
			http.Error(w, "Only one auth mechanism allowed", http.StatusBadRequest)
		case asks.Load():
			w.Header().Set("WWW-Authenticate", `Basic realm="give"`)
			w.WriteHeader(http.StatusUnauthorized)
		default:
			content.Serve(w, r)
		}
	}))
	content.Answer(func(w http.ResponseWriter, r *http.Request) bool {
		if strings.Contains(r.URL.Path, "/blobs/") {
			http.Redirect(w, r, "http://"+store+r.URL.Path, http.StatusTemporaryRedirect)
			return true
		}
		return false
	})
	if _, err := pull(t, n, host+"/redirected:1", &runtimeapi.AuthConfig{RegistryToken: "s3cret"}); err != nil {
		t.Error(err)
	}
	_, err := n.Image.RemoveImage(limited(t), &runtimeapi.RemoveImageRequest{Image: &runtimeapi.ImageSpec{Image: host + "/redirected:1"}})
	check(t, err)
	asks.Store(true)
	second := content.Image(ocispec.ImageConfig{User: "2"}, registry.Layer(registry.File("b", 0o644, "y")))
	content.Manifest("asked:1", second.MediaType, second)
	if _, err := pull(t, n, host+"/asked:1", &runtimeapi.AuthConfig{Username: "user", Password: "s3cret"}); err == nil {
		t.Error("pulled from a store that asks for a password")
	}
	if leaked.Load() {
		t.Error("credentials went to the redirect's host")
	}
}

// attack: registries: through the daemon: a tenant's registry trickles a layer that everyone needs, and another never ends a manifest
// held: the other pull of that layer ends by itself when it has been below the floor for 10 s; the trickling one ends at min_rate; the manifest is cut off
func TestSlowSourceHarmsItsOwnPullOnly(t *testing.T) {
	n := harness.NewNode(t, harness.Config("[images]\nprogress_timeout = '20s'\nmin_rate = 1024"))
	n.ImportBusybox() // makes the directories of the image store
	tenant, tenantHost := newRegistry(t, n)
	content, host := newRegistry(t, n)
	shared := registry.Layer(registry.File("base", 0o644, strings.Repeat("popular ", 100000)))
	for _, r := range []*registry.Registry{tenant, content} {
		m := r.Image(ocispec.ImageConfig{}, shared)
		r.Manifest("base:1", m.MediaType, m)
	}
	layer := content.Blob("", shared).Digest.String()
	reached := make(chan struct{}, 100)
	tenant.Answer(func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.HasSuffix(r.URL.Path, layer) {
			return false
		}
		reached <- struct{}{}
		for r.Context().Err() == nil {
			_, _ = w.Write([]byte{0})
			w.(http.Flusher).Flush()
			time.Sleep(time.Second)
		}
		return true
	})
	attacked := make(chan error, 1)
	go func() {
		_, err := n.Image.PullImage(t.Context(), &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: tenantHost + "/base:1"}})
		attacked <- err
	}()
	<-reached
	began := time.Now()
	_, err := pull(t, n, host+"/base:1", nil)
	check(t, err)
	t.Logf("the victim's pull took %s", time.Since(began))
	if err := <-attacked; err == nil || !strings.Contains(err.Error(), "less than the minimum of 1024 bytes per second") {
		t.Errorf("the attacker's pull: %v", err)
	}
	content.Answer(func(w http.ResponseWriter, r *http.Request) bool {
		w.Header().Set("Content-Type", ocispec.MediaTypeImageManifest)
		for r.Method == http.MethodGet && r.Context().Err() == nil {
			if _, err := w.Write([]byte(strings.Repeat(" ", 64<<10))); err != nil {
				break
			}
		}
		return true
	})
	if _, err := pull(t, n, host+"/endless:1", nil); err == nil || !strings.Contains(err.Error(), "too many for a manifest or a token") {
		t.Errorf("a manifest without end: %v", err)
	}
	_, err = n.Image.RemoveImage(limited(t), &runtimeapi.RemoveImageRequest{Image: &runtimeapi.ImageSpec{Image: host + "/base:1"}})
	check(t, err)
}
