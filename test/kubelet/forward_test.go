package kubelet

import (
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"

	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/transport/spdy"
)

// checkForward reads a file over a forwarded port, as kubectl port-forward.
func (k *kubelet) checkForward() {
	u := &url.URL{Scheme: "https", Host: k.server, Path: "/portForward/default/pair-" + nodeName}
	transport, upgrader, err := spdy.RoundTripperFor(clientConfig())
	check(k.t, err)
	dialer := spdy.NewDialer(upgrader, &http.Client{Transport: transport}, http.MethodPost, u)
	stop, ready, ended := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	f, err := portforward.NewOnAddresses(dialer, []string{"127.0.0.1"}, []string{"0:8080"}, stop, ready, io.Discard, io.Discard)
	check(k.t, err)
	go func() { ended <- f.ForwardPorts() }()
	select {
	case <-ready:
	case err := <-ended:
		k.t.Fatalf("port-forward ended: %v", err)
	case <-time.After(patience):
		k.t.Fatal("port-forward is not ready")
	}
	ports, err := f.GetPorts()
	check(k.t, err)
	if got := len(fetch(k.t, fmt.Sprintf("127.0.0.1:%d", ports[0].Local), "/big")); got != bigFile {
		k.t.Errorf("got %d bytes over a forwarded port", got)
	}
	close(stop)
	check(k.t, <-ended)
}
