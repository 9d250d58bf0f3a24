package trace

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/hostile/registry"
	"github.com/minicri/minicri/test/nodetest"
)

func TestMain(m *testing.M) { os.Exit(nodetest.Main(m)) }

const patience = 3 * time.Minute

type receiver struct {
	collector.UnimplementedTraceServiceServer
	mu    sync.Mutex
	spans []*tracepb.Span
}

func (r *receiver) Export(_ context.Context, request *collector.ExportTraceServiceRequest) (*collector.ExportTraceServiceResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, resource := range request.GetResourceSpans() {
		for _, scope := range resource.GetScopeSpans() {
			r.spans = append(r.spans, scope.GetSpans()...)
		}
	}
	return &collector.ExportTraceServiceResponse{}, nil
}

func (r *receiver) ServeHTTP(w http.ResponseWriter, request *http.Request) {
	body, err := io.ReadAll(request.Body)
	batch := &collector.ExportTraceServiceRequest{}
	if err == nil {
		err = proto.Unmarshal(body, batch)
	}
	if err != nil || request.URL.Path != "/v1/traces" {
		http.Error(w, fmt.Sprint(err), http.StatusBadRequest)
		return
	}
	_, _ = r.Export(request.Context(), batch)
	w.Header().Set("Content-Type", "application/x-protobuf")
}

func (r *receiver) of(trace string) map[string]*tracepb.Span {
	r.mu.Lock()
	defer r.mu.Unlock()
	found := make(map[string]*tracepb.Span)
	for _, span := range r.spans {
		if fmt.Sprintf("%x", span.GetTraceId()) == trace {
			found[span.GetName()] = span
		}
	}
	return found
}

const (
	ours  = "0af7651916cd43dd8448eb211c80319c"
	above = "b7ad6b7169203331"
)

// traced is the context of a caller that traces, as the kubelet is.
func traced(t *testing.T) context.Context {
	return metadata.AppendToOutgoingContext(t.Context(), "traceparent", "00-"+ours+"-"+above+"-01")
}

func TestSpansReachACollector(t *testing.T) {
	for _, protocol := range []string{"grpc", "http"} {
		t.Run(protocol, func(t *testing.T) {
			const address = "127.0.0.1:14317"
			n := nodetest.New(t, nodetest.NoNetwork(), nodetest.Config("[limits]\nreload = '20ms'\n[tracing]\nendpoint = '"+address+"'\nprotocol = '"+protocol+"'\n"))
			n.ImportBusybox()
			r := &receiver{}
			if protocol == "grpc" {
				server := grpc.NewServer()
				collector.RegisterTraceServiceServer(server, r)
				listener := n.Listen(address)
				go func() { _ = server.Serve(listener) }()
				t.Cleanup(server.Stop)
			} else {
				serve(t, n.Listen(address), r)
			}
			seen := filepath.Join(n.Dir, "seen")
			script := "#!/bin/sh\nprintf '%s %s\\n' \"$CNI_COMMAND\" \"$TRACEPARENT\" >> " + seen + "\nexec " + filepath.Join(n.CNIBin, "tuning") + "\n"
			harness.Check(t, os.WriteFile(filepath.Join(n.Plugins, "traced"), []byte(script), 0o755))
			n.WriteConflist("10-test.conflist", n.BridgePlugin(), nodetest.Object{"type": "traced"})
			harness.Eventually(t, "the network is there", func() bool {
				answer := nodetest.Call(t, n.Runtime.Status, &runtimeapi.StatusRequest{Verbose: true})
				return strings.Contains(answer.GetInfo()["cniconfig"], "traced")
			})
			answer, err := n.Runtime.RunPodSandbox(traced(t), &runtimeapi.RunPodSandboxRequest{Config: n.PodConfig("web")})
			harness.Check(t, err)
			var spans map[string]*tracepb.Span
			harness.Eventually(t, "the spans have come", func() bool {
				spans = r.of(ours)
				return spans["runtime.v1.RuntimeService/RunPodSandbox"] != nil && spans["bridge ADD"] != nil && spans["pod/start"] != nil
			})
			for child, parent := range harness.Sorted(map[string]string{
				"runtime.v1.RuntimeService/RunPodSandbox": "", "pod/cni add": "runtime.v1.RuntimeService/RunPodSandbox", "pod/start": "runtime.v1.RuntimeService/RunPodSandbox",
				"bridge ADD": "pod/cni add", "traced ADD": "pod/cni add",
			}) {
				got, want := fmt.Sprintf("%x", spans[child].GetParentSpanId()), above
				if parent != "" {
					want = fmt.Sprintf("%x", spans[parent].GetSpanId())
				}
				harness.Want(t, got == want, "%q is below %s, want %q (%s)", child, got, parent, want)
				harness.Want(t, attribute(spans[child], "pod") == "web",
					"%q does not say of which pod it is: %v", child, spans[child].GetAttributes())
				harness.Want(t, attribute(spans[child], "namespace") != "",
					"%q does not say of which pod it is: %v", child, spans[child].GetAttributes())
				harness.Want(t, attribute(spans[child], "sandbox") == answer.PodSandboxId,
					"%q does not say of which pod it is: %v", child, spans[child].GetAttributes())
			}
			data := harness.Read(t, seen)
			want := fmt.Sprintf("ADD 00-%s-%x-01\n", ours, spans["pod/cni add"].GetSpanId())
			harness.Want(t, strings.Contains(string(data), want), "the plugin was told %q, want %q", data, want)
			hookIsTold(t, n, answer.PodSandboxId)
			var create *tracepb.Span
			harness.Eventually(t, "the step's span has come", func() bool { create = r.of(ours)["container/create"]; return create != nil })
			for key, want := range harness.Sorted(map[string]string{"sandbox": answer.PodSandboxId, "container": "app", "image": nodetest.BusyboxImage}) {
				harness.Want(t, attribute(create, key) == want, "%s is %q, want %q", key, attribute(create, key), want)
			}
			blobsHaveSpans(t, n, r)
			n.RemovePod(answer.PodSandboxId)
			// A call without a decision of its caller is not traced.
			r.mu.Lock()
			defer r.mu.Unlock()
			for _, span := range r.spans {
				got := fmt.Sprintf("%x", span.GetTraceId())
				harness.Want(t, got == ours, "span %q of another trace %s", span.GetName(), got)
			}
		})
	}
}

func serve(t *testing.T, listener net.Listener, handler http.Handler) {
	server := &http.Server{Handler: handler, ReadHeaderTimeout: patience}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close() })
}

// hookIsTold makes a container with a hook of a vendor's device (CDI), which has to find the trace in its environment.
func hookIsTold(t *testing.T, n *nodetest.Node, pod string) {
	seen := filepath.Join(n.Dir, "hook")
	config := nodetest.Container("app", "true")
	config.CDIDevices = []*runtimeapi.CDIDevice{{Name: nodetest.CDIDevice(t, nodetest.Hook{Kind: "createRuntime", Script: "echo $TRACEPARENT > " + seen})}}
	_, err := n.Runtime.CreateContainer(traced(t), &runtimeapi.CreateContainerRequest{
		PodSandboxId: pod, SandboxConfig: n.PodConfig("web"), Config: config,
	})
	harness.Check(t, err)
	told := harness.Read(t, seen)
	harness.Want(t, strings.HasPrefix(string(told), "00-"+ours+"-") && !strings.Contains(string(told), above),
		"the hook was told %q, want a span of trace %s", told, ours)
}

// blobsHaveSpans pulls an image: each blob that is fetched has a span below that of the call, with digest and size.
func blobsHaveSpans(t *testing.T, n *nodetest.Node, r *receiver) {
	t.Helper()
	content := registry.New()
	listener := n.Listen("127.0.0.1:0")
	serve(t, listener, content)
	m := content.Image(ocispec.ImageConfig{}, registry.Layer(registry.File("a", 0o644, "x")), registry.Layer(registry.File("b", 0o644, "yy")))
	manifest := content.Manifest("app:1", m.MediaType, m)
	name := &runtimeapi.ImageSpec{Image: listener.Addr().String() + "/app:1"}
	_, err := n.Image.PullImage(traced(t), &runtimeapi.PullImageRequest{Image: name})
	harness.Check(t, err)
	nodetest.Call(t, n.Image.RemoveImage, &runtimeapi.RemoveImageRequest{Image: name})
	want := []string{
		"image/manifest " + manifest.Digest.String(), "image/configuration " + m.Config.Digest.String(),
		"image/layer " + m.Layers[0].Digest.String(), "image/layer " + m.Layers[1].Digest.String(),
	}
	slices.Sort(want)
	harness.Eventually(t, "the span of the call has come", func() bool {
		return r.of(ours)["runtime.v1.ImageService/PullImage"] != nil
	})
	call := r.of(ours)["runtime.v1.ImageService/PullImage"].GetSpanId()
	got := r.blobs(call)
	harness.Want(t, fmt.Sprint(got) == fmt.Sprint(want), "spans below the call:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
}

// blobs are the names and digests of the spans of blobs below a span, sorted. Spans of libraries may be between them.
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

// A collector that accepts connections and never answers, and one that is not there, cost no call and no shutdown
// anything: the daemon ends in far less than the harness waits for it, and pods are made as without one.
func TestCollectorThatDoesNotAnswer(t *testing.T) {
	for protocol, listens := range harness.Sorted(map[string]bool{"grpc": true, "http": false}) {
		t.Run(protocol, func(t *testing.T) {
			const address = "127.0.0.1:14318"
			n := nodetest.New(t, nodetest.Config("[tracing]\nendpoint = '"+address+"'\nprotocol = '"+protocol+"'\nsampling_rate_per_million = 1000000\n"))
			if listens {
				n.Listen(address) // the kernel accepts
			}
			for range 5 {
				n.RemovePod(n.RunPod(n.PodConfig("web")))
			}
			n.Restart()
			n.RemovePod(n.RunPod(n.PodConfig("web")))
		})
	}
}
