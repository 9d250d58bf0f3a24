package kubelet

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/hostile/registry"
)

// TestErrorsOfPulls reads the reasons and messages of a kubelet for failed pulls. Its events have the same text.
func TestErrorsOfPulls(t *testing.T) {
	k := newKubelet(t)
	content := registry.New()
	content.Manifest("foreign:1", ocispec.MediaTypeImageIndex, ocispec.Index{Manifests: []ocispec.Descriptor{{
		MediaType: ocispec.MediaTypeImageManifest, Digest: ocispec.DescriptorEmptyJSON.Digest, Size: 1,
		Platform: &ocispec.Platform{OS: "linux", Architecture: "s390x"},
	}}})
	login := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("WWW-Authenticate", `Basic realm="r"`)
		w.WriteHeader(http.StatusUnauthorized)
	})
	serve := func(handler http.Handler, secure bool) string {
		server := httptest.NewUnstartedServer(handler)
		server.Listener.Close()
		server.Listener = k.Listen(nodeAddress + ":0")
		if secure {
			server.StartTLS()
		} else {
			server.Start()
		}
		t.Cleanup(server.Close)
		return server.Listener.Addr().String()
	}
	local := func(handler http.Handler) string {
		listener := k.Listen("127.0.0.1:0")
		go func() { _ = http.Serve(listener, handler) }() // until the listener's end
		return listener.Addr().String()
	}
	k.start(nil)
	const pull, unavailable = "ErrImagePull", "RegistryUnavailable"
	tests := []struct{ name, image, reason, words, cure string }{
		{"absent", local(content) + "/app:2", pull, "not found in registry", "check name and tag"},
		{"login", local(login) + "/app:1", pull, "no basic auth credentials", "in the pod's imagePullSecrets"},
		{"platform", local(content) + "/foreign:1", pull, "the image is for linux/s390x, not for this node", ""},
		{"certificate", serve(content, true) + "/app:1", "", "x509: certificate is valid", "issue a certificate"},
		{"plain", serve(content, false) + "/app:1", unavailable, "HTTP response to HTTPS", `set server = "http://`},
		{"refused", nodeAddress + ":1/app:1", unavailable, "connection refused", "check whether the registry answers"},
		{"dns", "no-such-host.invalid/app:1", unavailable, "lookup no-such", "check the name no-such"},
	}
	for _, test := range tests {
		k.apply(test.name, "  containers: [{name: app, imagePullPolicy: Always, image: \""+test.image+"\"}]\n")
	}
	for _, test := range tests {
		message := ""
		k.eventually(test.name+" has an error", func() bool {
			pod := k.pods()[test.name]
			if pod == nil || len(pod.Status.ContainerStatuses) == 0 {
				return false
			}
			waiting := pod.Status.ContainerStatuses[0].State.Waiting
			if waiting == nil {
				return false
			}
			message = waiting.Reason + ": " + waiting.Message
			return strings.Contains(message, "pull ") && waiting.Reason != "ContainerCreating"
		})
		first, _, _ := strings.Cut(message, "\n")
		for _, words := range []string{test.reason, test.words, test.cure} {
			harness.Want(t, strings.Contains(first, words), "%s: %q, want %q", test.name, first, words)
		}
	}
	k.checkEverythingGoes()
	k.stop()
}
