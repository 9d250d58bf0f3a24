package trace

import (
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/hostile/registry"
)

// A pull has a span for each blob that it fetches, below that of the call, with
// digest and size.
func TestPullHasASpanForEachBlob(t *testing.T) {
	const address = "127.0.0.1:14317"
	n := harness.NewNode(t, harness.NoNetwork(), harness.Config("[tracing]\nendpoint = '"+address+"'\nprotocol = 'grpc'\n"))
	r := &receiver{}
	spans := grpc.NewServer()
	collector.RegisterTraceServiceServer(spans, r)
	listener := n.Listen(address)
	go func() { _ = spans.Serve(listener) }()
	t.Cleanup(spans.Stop)
	content := registry.New()
	server := &http.Server{Handler: content, ReadHeaderTimeout: patience}
	var images net.Listener
	n.RunInNetns(func() (err error) {
		images, err = net.Listen("tcp", "127.0.0.1:0")
		return err
	})
	go func() { _ = server.Serve(images) }()
	t.Cleanup(func() { _ = server.Close() })

	m := content.Image(ocispec.ImageConfig{}, registry.Layer(registry.File("a", 0o644, "x")), registry.Layer(registry.File("b", 0o644, "yy")))
	manifest := content.Manifest("app:1", m.MediaType, m)
	name := &runtimeapi.ImageSpec{Image: images.Addr().String() + "/app:1"}
	_, err := n.Image.PullImage(traced(t), &runtimeapi.PullImageRequest{Image: name})
	check(t, err)
	_, err = n.Image.RemoveImage(t.Context(), &runtimeapi.RemoveImageRequest{Image: name})
	check(t, err)
	want := []string{
		"image/manifest " + manifest.Digest.String(), "image/configuration " + m.Config.Digest.String(),
		"image/layer " + m.Layers[0].Digest.String(), "image/layer " + m.Layers[1].Digest.String(),
	}
	slices.Sort(want)
	harness.Eventually(t, "the span of the call has come", patience, func() bool {
		return r.of(ours)["runtime.v1.ImageService/PullImage"] != nil
	})
	call := r.of(ours)["runtime.v1.ImageService/PullImage"].GetSpanId()
	if got := r.blobs(call); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("spans below the call:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// blobs are the names and digests of the spans of blobs below a span, sorted.
// Spans of libraries may be between them.
func (r *receiver) blobs(above []byte) (found []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	parents := make(map[string]string)
	for _, span := range r.spans {
		parents[string(span.GetSpanId())] = string(span.GetParentSpanId())
	}
	for _, span := range r.spans {
		if !strings.HasPrefix(span.GetName(), "image/") || attribute(span, "size") == "" {
			continue
		}
		parent := string(span.GetParentSpanId())
		for parent != "" && parent != string(above) {
			parent = parents[parent]
		}
		if parent != "" {
			found = append(found, span.GetName()+" "+attribute(span, "digest"))
		}
	}
	slices.Sort(found)
	return found
}

func attribute(span *tracepb.Span, key string) string {
	for _, pair := range span.GetAttributes() {
		if pair.GetKey() == key {
			return pair.GetValue().GetStringValue()
		}
	}
	return ""
}
