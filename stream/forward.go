package stream

import (
	"context"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/streaming/pkg/httpstream/wsstream"

	"github.com/minicri/minicri/oci"
	"github.com/minicri/minicri/sandbox"
)

// dialTime is how long a connection to a pod may take.
const dialTime = 10 * time.Second

// PortForward checks a request to forward ports, and returns the URL that
// serves it once. Ports are those of TCP: the CRI has no word for others.
func (s *Server) PortForward(_ context.Context, r *runtimeapi.PortForwardRequest) (string, error) {
	if _, err := s.readyPod(r.GetPodSandboxId()); err != nil {
		return "", err
	}
	for _, port := range r.GetPort() {
		if port < 1 || port > 65535 {
			return "", fmt.Errorf("port: %d is not one, they are from 1 to 65535: %w", port, errdefs.ErrInvalidArgument)
		}
	}
	return s.url(request{kind: kindPortForward, target: r.GetPodSandboxId(), ports: r.GetPort()})
}

// forward serves port-forward over the transport of the client.
func (s *session) forward(u *upgrade, r request) {
	f := &forwarder{session: s, pod: r.target}
	switch {
	case wsstream.IsWebSocketRequestWithTunnelingProtocol(s.request):
		f.serveTunnel(u)
	case wsstream.IsWebSocketRequest(s.request):
		f.serveChannels(u, r.ports)
	default:
		f.serveSPDY(u)
	}
}

// forwarder makes the connections of one session.
type forwarder struct {
	session *session
	pod     string // id

	// sending is held while a piece is read from a pod and sent to the client: all
	// connections share one buffer, and a client that does not read holds up no
	// more than that.
	sending sync.Mutex
	buffer  []byte
}

// client is where a connection's data goes.
type client interface {
	io.Writer
	// Close says that nothing more is written.
	Close() error
	// Reset ends both directions.
	Reset()
}

// connect connects the client to a port of the pod, until both directions have
// ended. An error says why there is no connection, or why it was ended.
func (f *forwarder) connect(port int32, c client, pod *podConn) error {
	ctx := f.session.request.Context()
	if err := pod.dial(ctx, f, port); err != nil {
		return err
	}
	defer f.session.server.descriptors.release(1)
	defer pod.Abort()
	stop := context.AfterFunc(ctx, pod.Abort)
	defer stop()
	if err := f.receive(c, pod.tcp); err != nil {
		c.Reset() // what the pod or the client has done
	} else {
		_ = c.Close()
		<-pod.ended
	}
	return pod.failure()
}

// readyPod finds a pod whose ports can be forwarded.
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
