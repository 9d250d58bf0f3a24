package stream

import (
	"context"
	"fmt"
	"io"
	"net"
	"strconv"
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
			return "", fmt.Errorf("port: %d is none, they go from 1 to 65535: %w", port, errdefs.ErrInvalidArgument)
		}
	}
	return s.url("portforward", func(one *session, u *upgrade) {
		one.patient = true
		f := &forwarder{session: one, pod: r.GetPodSandboxId()}
		switch {
		case wsstream.IsWebSocketRequestWithTunnelingProtocol(one.request):
			f.serveTunnel(u)
		case wsstream.IsWebSocketRequest(one.request):
			f.serveChannels(u, r.GetPort())
		default:
			f.serveSPDY(u)
		}
	})
}

// forwarder makes the connections of one session.
type forwarder struct {
	session *session
	pod     string // id
}

// client is a client's side of one connection to a pod.
type client interface {
	// To close it says that nothing more is written.
	io.ReadWriteCloser
	// Reset ends both directions.
	Reset() error
	// IsFinished tells that Close has been called, or Reset on either side: what
	// is written arrives nowhere.
	IsFinished() bool
}

// forward connects the client to a port of the pod, until both directions have
// ended. An error says why there was no connection.
func (f *forwarder) forward(port int32, c client) error {
	ctx := f.session.request.Context()
	p := &podConn{dialed: make(chan struct{})}
	sent := make(chan struct{})
	// Begins before the pod has answered: until then, what the client sends
	// would hold up the others of its session.
	f.session.work.Go(func() {
		defer close(sent)
		p.send(c)
	})
	if err := p.dial(ctx, f, port); err != nil {
		return err // send ends with the client's stream
	}
	defer p.tcp.Close()
	stop := context.AfterFunc(ctx, func() { _ = p.tcp.Close() })
	defer stop()
	receive(c, p.tcp)
	<-sent
	return nil
}

// podConn is a connection to a pod that is being made.
type podConn struct {
	dialed chan struct{} // closed when the others are set
	tcp    *net.TCPConn  // nil with an error
	err    error
}

func (p *podConn) dial(ctx context.Context, f *forwarder, port int32) error {
	defer close(p.dialed)
	conn, err := f.session.server.dialPod(ctx, f.pod, port)
	if err != nil {
		p.err = err
		return err
	}
	p.tcp = conn.(*net.TCPConn)
	return nil
}

// Write implements io.Writer.
func (p *podConn) Write(b []byte) (int, error) {
	if <-p.dialed; p.err != nil {
		return 0, p.err
	}
	return p.tcp.Write(b)
}

// send copies from the client to the pod.
func (p *podConn) send(c client) {
	if transfer(p, c) != nil {
		// The pod takes no more; its answer may still be under way.
		_, _ = io.Copy(io.Discard, c)
	}
	if <-p.dialed; p.err != nil {
		return
	}
	_ = p.tcp.CloseWrite() // fails if the pod has closed it
	if c.IsFinished() {
		_ = p.tcp.Close() // nobody is there for an answer
	}
}

// receive copies from the pod to the client.
func receive(c client, pod *net.TCPConn) {
	if transfer(c, pod) != nil {
		_ = c.Reset() // what the pod or the client has done
		return
	}
	_ = c.Close()
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
