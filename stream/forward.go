package stream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/cri-streaming/pkg/streaming/portforward"

	"github.com/minicri/minicri/oci"
	"github.com/minicri/minicri/sandbox"
)

const (
	dialTime = 10 * time.Second
	// maxForwards bounds the connections of one session.
	maxForwards = 1000
)

// PortForward checks a request to forward ports, and returns the URL that
// serves it once.
func (s *Server) PortForward(_ context.Context, r *runtimeapi.PortForwardRequest) (string, error) {
	if _, err := s.readyPod(r.GetPodSandboxId()); err != nil {
		return "", err
	}
	for _, port := range r.GetPort() {
		if port < 1 || port > 65535 {
			return "", fmt.Errorf("port: %d is none, they go from 1 to 65535: %w", port, errdefs.ErrInvalidArgument)
		}
	}
	return s.url("portforward", func(one *session, w http.ResponseWriter) {
		one.patient = true
		f := &forwarder{session: one, idle: make(chan struct{})}
		portforward.ServePortForward(w, one.request, f, r.GetPodSandboxId(), "", &portforward.V4Options{Ports: r.GetPort()},
			s.options.Idle, s.options.Creation, portforward.SupportedProtocols)
		f.close()
	})
}

func (s *Server) readyPod(id string) (*sandbox.Sandbox, error) {
	pod, err := s.options.Pods.Find(id)
	if err != nil {
		return nil, err
	}
	if !pod.Ready() {
		return nil, fmt.Errorf("port-forward to sandbox %s: it is stopped: %w", pod.ID, errdefs.ErrFailedPrecondition)
	}
	return pod, nil
}

// forwarder makes the connections of one session.
type forwarder struct {
	session *session

	mu     sync.Mutex
	count  int
	closed bool
	idle   chan struct{} // closed when closed and count is 0
}

func (f *forwarder) begin() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return errors.New("the client is gone")
	}
	if f.count >= maxForwards {
		return fmt.Errorf("%d connections are open already: %w", f.count, errdefs.ErrResourceExhausted)
	}
	f.count++
	return nil
}

func (f *forwarder) done() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.count--
	if f.closed && f.count == 0 {
		close(f.idle)
	}
}

// close lets what the client has sent arrive, and ends what goes on then.
func (f *forwarder) close() {
	f.mu.Lock()
	f.closed = true
	if f.count == 0 {
		close(f.idle)
	}
	f.mu.Unlock()
	select {
	case <-f.idle:
	case <-f.session.request.Context().Done():
	}
}

// PortForward implements portforward.PortForwarder: it connects one stream of
// the client to a port of the pod, until both directions have ended.
func (f *forwarder) PortForward(_ context.Context, id, _ string, port int32, stream io.ReadWriteCloser) error {
	if err := f.begin(); err != nil {
		return err
	}
	defer f.done()
	ctx := f.session.request.Context() // the library's one never ends
	conn, err := f.session.server.dialPod(ctx, id, port)
	if err != nil {
		return err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	return f.join(stream, conn.(*net.TCPConn))
}

// join copies both ways, each to its own end.
func (f *forwarder) join(client io.ReadWriteCloser, pod *net.TCPConn) error {
	sent := make(chan struct{})
	f.session.work.Go(func() {
		defer close(sent)
		if transfer(pod, client) == nil {
			_ = pod.CloseWrite() // fails if the pod has closed it
			return
		}
		// The pod takes no more; its answer may still be under way.
		_, _ = io.Copy(io.Discard, client)
	})
	err := transfer(client, pod)
	_ = client.Close()
	if f.session.webSocket {
		return nil // its client cannot half-close, and the library closes when we return
	}
	if err == nil {
		<-sent
	}
	return nil
}

// dialPod connects to a port of localhost as the pod sees it.
func (s *Server) dialPod(ctx context.Context, id string, port int32) (net.Conn, error) {
	pod, err := s.readyPod(id)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, dialTime)
	defer cancel()
	dial := new(net.Dialer).DialContext
	if !oci.HostNetwork(pod.Config()) {
		dial = func(ctx context.Context, network, address string) (net.Conn, error) {
			return s.options.Netns.Dial(ctx, pod.ID, network, address)
		}
	}
	text := strconv.Itoa(int(port))
	conn, err := dial(ctx, "tcp4", net.JoinHostPort("127.0.0.1", text))
	if err == nil {
		return conn, nil
	}
	conn, err6 := dial(ctx, "tcp6", net.JoinHostPort("::1", text))
	if err6 == nil {
		return conn, nil
	}
	return nil, fmt.Errorf("port %d of sandbox %s: %w; %w", port, pod.ID, err, err6)
}
