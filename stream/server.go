package stream

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/sandbox"
)

// Options say where and how sessions are served.
type Options struct {
	// Address is the TCP address to listen on; port 0 is any.
	Address string
	// TLS is the certificate by which clients know the server.
	TLS TLS
	// Idle is how long a session may be silent, Creation how long a client may
	// take to open its streams.
	Idle, Creation time.Duration
	// MaxOpen bounds the requests whose client is here or still to come.
	MaxOpen    int
	Containers Containers
	Pods       Pods
	Netns      Netns
	Logger     *slog.Logger
}

// Containers are those to exec in and to attach to.
type Containers interface {
	CheckExec(ctx context.Context, id string, command []string) error
	Exec(ctx context.Context, id string, command []string, stdin, tty bool) (*container.Process, error)
	CheckAttach(ctx context.Context, id string, tty bool) error
	Attach(ctx context.Context, id string) (*container.Process, error)
}

// Pods are those to forward ports of.
type Pods interface {
	Find(id string) (*sandbox.Sandbox, error)
}

// Netns are the pods' network namespaces.
type Netns interface {
	Dial(ctx context.Context, id, network, address string) (net.Conn, error)
}

// Server makes sessions and serves them. It may be used by many goroutines.
type Server struct {
	options  Options
	listener net.Listener
	address  url.URL
	requests *requests
	// strangers are the connections that have not shown a token yet.
	strangers   strangers
	descriptors descriptors
	// base ends when the server is closed, and with it all sessions.
	base   context.Context
	cancel context.CancelFunc
}

// Listen opens the listener; Serve then serves it.
func Listen(ctx context.Context, options Options) (*Server, error) {
	listener, err := listen(ctx, options.Address)
	if err != nil {
		return nil, err
	}
	s := &Server{
		options: options, requests: newRequests(options.MaxOpen), descriptors: descriptors{limit: descriptorLimit()},
		address: url.URL{Scheme: "http", Host: reachable(listener.Addr())},
	}
	s.base, s.cancel = context.WithCancel(context.WithoutCancel(ctx))
	config, err := options.TLS.Config(s.address.Hostname())
	if err != nil {
		return nil, errors.Join(err, listener.Close())
	}
	if config != nil {
		s.address.Scheme = "https"
		listener = tls.NewListener(listener, config)
	}
	s.listener = listener
	return s, nil
}

func listen(ctx context.Context, address string) (net.Listener, error) {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("listen for exec, attach and port-forward (streaming.address): %w", err)
	}
	return listener, nil
}

// CheckAddress listens for a moment, and returns the error with which Listen would fail.
func CheckAddress(ctx context.Context, address string) error {
	listener, err := listen(ctx, address)
	if err != nil {
		return err
	}
	return listener.Close()
}

// reachable is what clients of this machine, such as the kubelet, dial.
func reachable(address net.Addr) string {
	tcp := *address.(*net.TCPAddr)
	if tcp.IP.IsUnspecified() && tcp.IP.To4() != nil {
		tcp.IP = net.IPv4(127, 0, 0, 1)
	} else if tcp.IP.IsUnspecified() {
		tcp.IP = net.IPv6loopback
	}
	return tcp.String()
}

const (
	// headerTime is how long a client may take to send its request.
	headerTime = 5 * time.Second
	// headerSize bounds the request, of which most is what the kubelet passes on.
	headerSize = 32 << 10
)

// Serve serves until Close.
func (s *Server) Serve() error {
	mux := http.NewServeMux()
	mux.HandleFunc("/{kind}/{token}", s.serve)
	server := &http.Server{
		Handler: mux, ReadHeaderTimeout: headerTime, IdleTimeout: headerTime, MaxHeaderBytes: headerSize,
		ConnState:   s.strangers.watch,
		BaseContext: func(net.Listener) context.Context { return s.base },
		ErrorLog:    slog.NewLogLogger(s.options.Logger.Handler(), slog.LevelDebug),
	}
	server.SetKeepAlivesEnabled(false) // a connection has one token
	stop := context.AfterFunc(s.base, func() { _ = server.Close() })
	defer stop()
	err := server.Serve(s.listener)
	if s.base.Err() != nil {
		return nil
	}
	return fmt.Errorf("serve exec, attach and port-forward: %w", err)
}

// Close ends all sessions, and with them the execs, and returns when they have
// ended.
func (s *Server) Close() error {
	s.cancel()
	err := s.listener.Close()
	s.requests.close()
	if errors.Is(err, net.ErrClosed) { // http.Server was faster
		return nil
	}
	return err
}

// url makes the URL that stands for a request.
func (s *Server) url(r request) (string, error) {
	token, err := s.requests.add(r)
	if err != nil {
		return "", err
	}
	return s.address.JoinPath(r.kind, token).String(), nil
}

// serve answers nothing without a token.
func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	asked, found := s.requests.take(r.PathValue("token"))
	if !found {
		http.NotFound(w, r)
		return
	}
	if err := s.descriptors.take(sessionDescriptors); err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	defer s.descriptors.release(sessionDescriptors)
	s.session(w, r, asked)
}

// Open counts the sessions that have not ended.
func (s *Server) Open() int {
	s.requests.mu.Lock()
	defer s.requests.mu.Unlock()
	return len(s.requests.open)
}

const (
	// tokenLife is how long a client may take to come.
	tokenLife = time.Minute
	// idleGrace is how long a session has to be silent before it makes room for
	// another one, when there are too many.
	idleGrace = time.Minute
)

// The kinds of requests, which are also in their URLs.
const (
	kindExec        = "exec"
	kindAttach      = "attach"
	kindPortForward = "portforward"
)

// request is what a URL stands for.
type request struct {
	kind string
	// target is the id of a container, or of a sandbox for port-forward.
	target  string
	options remotecommand.Options // of exec and attach
	command []string              // of exec
	ports   []int32               // of port-forward over a WebSocket with channels
}

// requests are those whose client has not come yet, by their tokens, and the
// sessions of those whose client is here.
type requests struct {
	limit int // of both together

	mu      sync.Mutex
	pending map[string]*pending
	open    map[*session]struct{}
	closed  bool
	// handled counts the sessions that have not ended, to wait for.
	handled sync.WaitGroup
}

// pending is a request that waits for its client.
type pending struct {
	request request
	expires *time.Timer
}

func newRequests(limit int) *requests {
	return &requests{limit: limit, pending: make(map[string]*pending), open: make(map[*session]struct{})}
}

// add makes a token for a request; errdefs.ErrResourceExhausted when there are
// too many, and none of them is a session that is silent.
func (r *requests) add(one request) (token string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return "", fmt.Errorf("exec, attach and port-forward are not served any more: %w", errdefs.ErrUnavailable)
	}
	if len(r.pending)+len(r.open) >= r.limit && !r.makeRoom() {
		return "", fmt.Errorf("%d requests to exec, attach or port-forward are open, which is the limit (streaming.max_open): %w", r.limit, errdefs.ErrResourceExhausted)
	}
	token = rand.Text()
	r.pending[token] = &pending{request: one, expires: time.AfterFunc(tokenLife, func() { r.expire(token) })}
	return token, nil
}

// makeRoom ends the session that has been silent longest, if there is one whose
// time is over; mu is held.
func (r *requests) makeRoom() bool {
	var oldest *session
	for s := range r.open {
		if s.silence() >= idleGrace && (oldest == nil || s.silence() > oldest.silence()) {
			oldest = s
		}
	}
	if oldest == nil {
		return false
	}
	oldest.lost()
	delete(r.open, oldest)
	return true
}

func (r *requests) expire(token string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.pending, token)
}

// take uses a token up, and reports whether there is such a one.
func (r *requests) take(token string) (one request, found bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.pending[token]
	if p == nil {
		return request{}, false
	}
	delete(r.pending, token)
	p.expires.Stop()
	return p.request, true
}

// begin counts a session, and reports whether sessions may still begin. The
// caller calls end when it has ended.
func (r *requests) begin(s *session) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return false
	}
	r.open[s] = struct{}{}
	r.handled.Add(1)
	return true
}

func (r *requests) end(s *session) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.open, s)
	r.handled.Done()
}

// close drops all that are pending, takes no more, and waits for the sessions.
func (r *requests) close() {
	r.mu.Lock()
	r.closed = true
	for token, p := range r.pending {
		p.expires.Stop()
		delete(r.pending, token)
	}
	r.mu.Unlock()
	r.handled.Wait()
}

// TLS is how sessions are secured: not at all when it is zero.
type TLS struct {
	// Cert and Key are PEM files, read anew for each connection, so that they
	// can be replaced.
	Cert, Key string
	// SelfSigned makes a certificate that lasts as long as the daemon.
	SelfSigned bool
}

// selfSignedLife is more than a daemon runs.
const selfSignedLife = 10 * 365 * 24 * time.Hour

// Check returns why the files cannot be used.
func (t TLS) Check() error {
	_, err := t.load()
	return err
}

// load reads the files; the certificate is nil where none are named.
func (t TLS) load() (*tls.Certificate, error) {
	if t.Cert == "" {
		return nil, nil
	}
	certificate, err := tls.LoadX509KeyPair(t.Cert, t.Key)
	if err != nil {
		return nil, fmt.Errorf("the certificate: %w", err)
	}
	return &certificate, nil
}

// Config is nil without TLS. What cannot be used is an error now.
func (t TLS) Config(host string) (*tls.Config, error) {
	if t.SelfSigned {
		certificate, err := selfSign(host)
		if err != nil {
			return nil, fmt.Errorf("make a certificate: %w", err)
		}
		return &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{*certificate}}, nil
	}
	if first, err := t.load(); first == nil || err != nil {
		return nil, err
	}
	load := func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return t.load() }
	return &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: load}, nil
}

func selfSign(host string) (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: "minicri"},
		NotBefore:    time.Now().Add(-time.Hour), // clocks differ
		NotAfter:     time.Now().Add(selfSignedLife),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		IPAddresses:  []net.IP{net.ParseIP(host)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}
