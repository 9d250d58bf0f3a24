package stream

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/net/websocket"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/cri-streaming/pkg/streaming/portforward"
	"k8s.io/streaming/pkg/httpstream/wsstream"

	"github.com/minicri/minicri/oci"
	"github.com/minicri/minicri/sandbox"
	"github.com/minicri/minicri/stream/spdy"
)

const (
	dialTime    = 10 * time.Second // how long to connect to a pod may take
	maxForwards = 128              // connections of a session, which cost the daemon a MiB at most
	receiveSize = 32 << 10         // what is read from a pod at once
)

// PortForward checks a request to forward TCP ports, and returns the URL that serves it once.
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

func (s *session) forward(r request) {
	f := &forwarder{session: s, pod: r.target}
	switch {
	case wsstream.IsWebSocketRequestWithTunnelingProtocol(s.request):
		f.serveTunnel()
	case wsstream.IsWebSocketRequest(s.request):
		f.serveChannels(r.ports)
	default:
		if conn, _, err := s.upgradeSPDY(portforward.ProtocolV1Name); err == nil { // or the client has its answer
			f.servePairs(conn)
		}
	}
}

// forwarder makes the connections of one session.
type forwarder struct {
	session *session
	pod     string     // its ID
	sending sync.Mutex // held while a piece goes from a pod to the client; guards buffer
	buffer  [receiveSize]byte
}

// connect connects the client to a port of the pod, until both directions have ended. It calls
// received when no more comes from the pod, with an error if the pod or the client broke the
// connection. It fails if it cannot connect, or if the pod has stalled.
func (f *forwarder) connect(port int32, data io.Writer, in *inlet, received func(error)) error {
	defer in.Abort()
	server := f.session.server
	if !server.descriptors.TryAcquire(1) {
		in.cancel(errNoDescriptors)
		return errNoDescriptors
	}
	defer server.descriptors.Release(1)
	conn, err := server.dialPod(in.ctx, f.pod, port)
	if err != nil {
		in.cancel(err)
		return err
	}
	defer conn.Close()
	in.lead(conn)
	err = f.receive(data, conn)
	if err != nil {
		in.Abort()
	}
	received(err)
	<-in.open.Done()
	if errors.Is(context.Cause(in.ctx), errStalled) {
		return errStalled
	}
	return nil
}

// receive copies from the pod to the client. It fails if one of them broke the connection.
func (f *forwarder) receive(to io.Writer, pod *net.TCPConn) error {
	raw, err := pod.SyscallConn()
	if err != nil {
		return err
	}
	for {
		// Other connections use the buffer until there is something to read.
		if err := raw.Read(func(fd uintptr) bool { return ready(fd, unix.POLLIN) }); err != nil {
			return err
		}
		f.sending.Lock()
		n, err := pod.Read(f.buffer[:])
		if n > 0 {
			_, err = to.Write(f.buffer[:n])
		}
		f.sending.Unlock()
		if errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
	}
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
func (s *Server) dialPod(ctx context.Context, id string, port int32) (*net.TCPConn, error) {
	pod, err := s.readyPod(id)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, dialTime)
	defer cancel()
	dial := new(net.Dialer).DialContext
	if !oci.HostNetwork(pod.Config()) {
		dial = func(ctx context.Context, network, address string) (net.Conn, error) {
			return s.options.Dial(ctx, pod.ID, network, address)
		}
	}
	text := strconv.Itoa(int(port))
	conn, err := dial(ctx, "tcp4", net.JoinHostPort("127.0.0.1", text))
	if err == nil {
		return conn.(*net.TCPConn), nil
	}
	conn, err6 := dial(ctx, "tcp6", net.JoinHostPort("::1", text))
	if err6 == nil {
		return conn.(*net.TCPConn), nil
	}
	return nil, fmt.Errorf("port %d of sandbox %s: %w; %w", port, pod.ID, err, err6)
}

// serveTunnel forwards over SPDY in a WebSocket, which an API server would translate to SPDY.
func (f *forwarder) serveTunnel() {
	const tunnel = portforward.WebsocketsSPDYTunnelingPortForwardV1
	websocket.Server{
		Handshake: func(c *websocket.Config, _ *http.Request) error {
			if !slices.Contains(c.Protocol, tunnel) {
				return fmt.Errorf("protocols %q: none is %s", c.Protocol, tunnel)
			}
			c.Protocol = []string{tunnel}
			return nil
		},
		Handler: func(conn *websocket.Conn) {
			conn.PayloadType = websocket.BinaryFrame
			f.servePairs(conn)
		},
	}.ServeHTTP(f.session, f.session.request)
}

// pairs are the streams of a session. A client opens two for each connection, for data and for an
// error, with the same request ID. An old client sends no IDs, and opens one pair after the other.
type pairs struct {
	*forwarder
	half  map[string]*pair // whose other stream is missing; of accept
	count atomic.Int32     // of those, and of the complete ones
	open  sync.WaitGroup   // the complete ones
}

type pair struct {
	data, errors *spdy.Stream
	in           *inlet // of data
}

// servePairs serves until the client has left and its data has been delivered, or the session ends.
func (f *forwarder) servePairs(conn net.Conn) {
	p := &pairs{forwarder: f, half: make(map[string]*pair)}
	c := spdy.NewConn(conn, p.accept)
	defer c.Close()
	<-f.session.serveSPDY(c)
	p.open.Wait()
}

// accept takes a stream of the client. The stream that completes a pair starts its connection.
func (p *pairs) accept(stream *spdy.Stream) (spdy.Sink, error) {
	port, err := strconv.ParseUint(stream.Header.Get(portforward.PortHeader), 10, 16)
	if err != nil || port == 0 {
		return nil, fmt.Errorf("header %s: %q is no port", portforward.PortHeader, stream.Header.Get(portforward.PortHeader))
	}
	if err := stream.Reply(); err != nil {
		return nil, err
	}
	id := stream.Header.Get(portforward.PortForwardRequestIDHeader)
	one, err := p.add(id, stream)
	if err != nil {
		writeError(stream, err)
		return nil, err
	}
	if one.data != nil && one.errors != nil {
		delete(p.half, id)
		p.open.Go(func() { p.serve(one, int32(port)) })
	}
	if stream == one.data {
		return one.in, nil
	}
	return nil, nil // the client only reads it
}

func (p *pairs) add(id string, stream *spdy.Stream) (*pair, error) {
	one := p.half[id]
	if one == nil {
		if open := p.count.Load(); open >= maxForwards {
			return nil, fmt.Errorf("%d connections of this session are open already", open)
		}
		p.count.Add(1)
		one = &pair{in: p.session.newInlet(true)}
		p.half[id] = one
	}
	kind := stream.Header.Get(portforward.StreamType)
	switch {
	case kind == portforward.StreamTypeData && one.data == nil:
		one.data = stream
	case kind == portforward.StreamTypeError && one.errors == nil:
		one.errors = stream
	default:
		return nil, fmt.Errorf("header %s: %q is unknown, or came twice", portforward.StreamType, kind)
	}
	return one, nil
}

// serve makes the connection of a pair, or tells the client why it cannot.
func (p *pairs) serve(one *pair, port int32) {
	received := func(err error) {
		if err != nil {
			one.data.Reset()
		}
		_ = one.data.Close()
	}
	if err := p.connect(port, one.data, one.in, received); err != nil {
		writeError(one.errors, err)
	}
	_ = one.errors.Close()
	one.errors.Reset()
	one.data.Reset()
	p.count.Add(-1)
}

// serveChannels forwards over a WebSocket with two channels for each port, for data and for an error,
// that begin with the port's number. Neither side can half-close a port's one connection.
func (f *forwarder) serveChannels(ports []int32) {
	ports = ports[:min(len(ports), maxForwards)] // a byte is the number of a channel
	sinks := make([]spdy.Sink, 2*len(ports))
	inlets := make([]*inlet, len(ports))
	for i := range ports {
		inlets[i] = f.session.newInlet(true)
		sinks[2*i] = inlets[i]
	}
	served := func(name string) (channelProtocol, bool) {
		p, served := commandProtocol(name)
		return p, served && (name == "" || p.status && !p.halfClose) // v4
	}
	f.session.serveChannels(served, sinks, func(c *channels) {
		var open sync.WaitGroup
		for i, port := range ports {
			data, errors := channelWriter{c, byte(2 * i)}, channelWriter{c, byte(2*i + 1)}
			open.Go(func() {
				for _, to := range []io.Writer{data, errors} {
					if _, err := to.Write(binary.LittleEndian.AppendUint16(nil, uint16(port))); err != nil {
						return
					}
				}
				if err := f.connect(port, data, inlets[i], func(error) { inlets[i].Abort() }); err != nil {
					writeError(errors, err)
				}
			})
		}
		open.Wait()
	})
}

func writeError(to io.Writer, err error) { _, _ = io.WriteString(to, err.Error()) }
