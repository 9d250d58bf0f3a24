package hostile

import (
	"net/http"
	"os"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/hostile/registry"
)

func TestMain(m *testing.M) { os.Exit(harness.Main(m)) }

// serve serves a handler on loopback of the node's network namespace and returns
// its host and port.
func serve(t testing.TB, n *harness.Node, address string, handler http.Handler) string {
	t.Helper()
	listener := n.Listen(address)
	server := &http.Server{Handler: handler, ReadHeaderTimeout: patience}
	go func() { _ = server.Serve(listener) }() // until Close
	t.Cleanup(func() { _ = server.Close() })
	return listener.Addr().String()
}

// newRegistry is a hostile registry that the node reaches at host.
func newRegistry(t testing.TB, n *harness.Node) (content *registry.Registry, host string) {
	t.Helper()
	content = registry.New()
	return content, serve(t, n, "127.0.0.1:0", content)
}

// pull asks the daemon as the kubelet does.
func pull(t testing.TB, n *harness.Node, reference string, auth *runtimeapi.AuthConfig) (id string, err error) {
	t.Helper()
	answer, err := n.Image.PullImage(limited(t), &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: reference}, Auth: auth})
	return answer.GetImageRef(), err
}

func run(t testing.TB, n *harness.Node, container string, command ...string) (code int32, output string) {
	t.Helper()
	answer, err := n.Runtime.ExecSync(limited(t), &runtimeapi.ExecSyncRequest{ContainerId: container, Cmd: command, Timeout: 60})
	check(t, err)
	return answer.GetExitCode(), string(answer.GetStdout()) + string(answer.GetStderr())
}
