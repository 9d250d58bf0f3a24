package stream

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/net/websocket"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/cri-streaming/pkg/streaming/portforward"
	"k8s.io/streaming/pkg/httpstream/wsstream"

	"github.com/minicri/minicri/oci"
	"github.com/minicri/minicri/sandbox"
	"github.com/minicri/minicri/stream/spdy"
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

// maxForwards bounds the connections of one session: each costs the daemon some
// KiB, and a session no more than a MiB.
const maxForwards = 128

// pairs are the streams of a port-forward's session. A client opens two for
// each connection, one for data and one for an error, and names both with the
// same request id.
type pairs struct {
	*forwarder
	conn *spdy.Conn

	mu    sync.Mutex
	half  map[string]*pair // whose other stream is still to come
	count int              // of those, and of the complete ones
	open  sync.WaitGroup   // the complete ones
}

type pair struct {
	data, errors *spdy.Stream
	pod          *podConn // of data
	expire       *time.Timer
}

// serveSPDY forwards over SPDY.
func (f *forwarder) serveSPDY(u *upgrade) {
	conn, _, err := f.session.upgradeSPDY(u, portforward.ProtocolV1Name)
	if err != nil {
		return // the client has its answer
	}
	f.servePairs(conn)
}

// serveTunnel forwards over SPDY whose bytes come in the messages of a
// WebSocket. To the node of a cluster the API server speaks SPDY; this is for
// clients that come here without it.
func (f *forwarder) serveTunnel(u *upgrade) {
	server := websocket.Server{
		Handshake: func(c *websocket.Config, _ *http.Request) error {
			for _, protocol := range c.Protocol {
				if protocol == portforward.WebsocketsSPDYTunnelingPortForwardV1 {
					c.Protocol = []string{protocol}
					return nil
				}
			}
			return fmt.Errorf("protocols %q: none is %s", c.Protocol, portforward.WebsocketsSPDYTunnelingPortForwardV1)
		},
		Handler: func(conn *websocket.Conn) {
			conn.PayloadType = websocket.BinaryFrame
			f.servePairs(conn)
		},
	}
	server.ServeHTTP(u, f.session.request)
}

// servePairs returns when the client has closed the connection and all that it
// had sent has been delivered, or the session has ended.
func (f *forwarder) servePairs(conn net.Conn) {
	p := &pairs{forwarder: f, half: make(map[string]*pair)}
	p.conn = spdy.NewConn(conn, p.accept)
	defer p.conn.Close()
	served := f.session.serveSPDY(p.conn)
	select {
	case <-served:
	case <-f.session.request.Context().Done():
		<-served // the end of the session closes the connection
	}
	p.open.Wait()
	p.forget()
}

// forget drops the pairs that will never be complete.
func (p *pairs) forget() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, one := range p.half {
		one.expire.Stop()
	}
	clear(p.half)
}

// accept is called for a stream of the client. It does not wait: the stream
// that completes a pair starts its connection.
func (p *pairs) accept(stream *spdy.Stream) (spdy.Sink, error) {
	port, err := strconv.ParseUint(stream.Header.Get(portforward.PortHeader), 10, 16)
	if err != nil || port == 0 {
		return nil, fmt.Errorf("header %s: %q is no port", portforward.PortHeader, stream.Header.Get(portforward.PortHeader))
	}
	if err := stream.Reply(); err != nil {
		return nil, err
	}
	one, complete, err := p.add(stream)
	if err != nil {
		writeError(stream, err)
		return nil, err
	}
	if complete {
		p.session.work.Go(func() { p.serve(one, int32(port)) })
	}
	if stream == one.data {
		return one.pod, nil
	}
	return nil, nil // the client only reads it
}

// add finds the pair of a stream, and reports whether it is complete; it is
// counted in open then.
func (p *pairs) add(stream *spdy.Stream) (one *pair, complete bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	id := requestID(stream)
	one = p.half[id]
	if one == nil {
		if p.count >= maxForwards {
			return nil, false, fmt.Errorf("%d connections of this session are open already", p.count)
		}
		p.count++
		one = &pair{pod: newPodConn(), expire: time.AfterFunc(p.session.server.options.Creation, func() { p.abandon(id) })}
		p.half[id] = one
	}
	if err := one.take(stream); err != nil {
		return nil, false, err
	}
	if one.data == nil || one.errors == nil {
		return one, false, nil
	}
	one.expire.Stop()
	delete(p.half, id)
	p.open.Add(1)
	return one, true, nil
}

func (one *pair) take(stream *spdy.Stream) error {
	kind := stream.Header.Get(portforward.StreamType)
	switch {
	case kind == portforward.StreamTypeData && one.data == nil:
		one.data = stream
	case kind == portforward.StreamTypeError && one.errors == nil:
		one.errors = stream
	default:
		return fmt.Errorf("header %s: %q is unknown, or came twice", portforward.StreamType, kind)
	}
	return nil
}

// requestID is what both streams of a pair have in common. A client that does
// not say it opens the error stream just before the data stream, with numbers
// that differ by 2.
func requestID(stream *spdy.Stream) string {
	if id := stream.Header.Get(portforward.PortForwardRequestIDHeader); id != "" {
		return id
	}
	number := stream.ID
	if stream.Header.Get(portforward.StreamType) == portforward.StreamTypeData {
		number -= 2
	}
	return strconv.FormatUint(uint64(number), 10)
}

// abandon gives up a pair whose other stream did not come in time.
func (p *pairs) abandon(id string) {
	p.mu.Lock()
	one := p.half[id]
	delete(p.half, id)
	if one != nil {
		p.count--
	}
	p.mu.Unlock()
	if one == nil {
		return // it came at the last moment
	}
	if one.errors != nil {
		writeError(one.errors, errors.New("the stream for data did not come in time (streaming.creation_timeout)"))
		one.errors.Reset()
	}
	if one.data != nil {
		one.data.Reset()
	}
}

// serve makes the connection of a pair, and says why if it cannot.
func (p *pairs) serve(one *pair, port int32) {
	defer p.open.Done()
	if err := p.connect(port, one.data, one.pod); err != nil {
		writeError(one.errors, err)
	}
	_ = one.errors.Close()
	one.errors.Reset()
	one.data.Reset()
	p.mu.Lock()
	p.count--
	p.mu.Unlock()
}

// serveChannels forwards over a WebSocket with two channels for each port, one
// for data and one for an error, that begin with the port's number. Each port
// has one connection, of which no side can close its half alone.
func (f *forwarder) serveChannels(u *upgrade, ports []int32) {
	if len(ports) > maxForwards {
		ports = ports[:maxForwards] // a byte is the number of a channel
	}
	sinks := make([]sink, 2*len(ports))
	pods := make([]*podConn, len(ports))
	for i := range ports {
		pods[i] = newPodConn()
		sinks[2*i] = pods[i]
	}
	c, err := f.session.openChannels(u, map[string]channelProtocol{
		"": {},
		"v4." + wsstream.ChannelWebSocketProtocol:       {},
		"v4." + wsstream.Base64ChannelWebSocketProtocol: {base64: true},
	}, sinks)
	if err != nil {
		return // the client has its answer
	}
	defer c.close()
	var open sync.WaitGroup
	for i, port := range ports {
		open.Go(func() { f.connectChannel(port, pods[i], c.writer(byte(2*i)), c.writer(byte(2*i+1))) })
	}
	open.Wait()
}

// connectChannel makes the connection of a port, and says why if it cannot.
func (f *forwarder) connectChannel(port int32, pod *podConn, data, errors io.WriteCloser) {
	number := binary.LittleEndian.AppendUint16(nil, uint16(port))
	for _, to := range []io.Writer{data, errors} {
		if _, err := to.Write(number); err != nil {
			return
		}
	}
	if err := f.connect(port, channelClient{data, pod}, pod); err != nil {
		writeError(errors, err)
	}
}

// channelClient is a client's end of a connection over channels. A channel
// cannot be closed alone, so to close one direction ends both.
type channelClient struct {
	io.Writer
	pod *podConn
}

// Close implements client.
func (c channelClient) Close() error {
	c.pod.Abort()
	return nil
}

// Reset implements client.
func (c channelClient) Reset() { c.pod.Abort() }
