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
	"maps"
	"math/big"
	"net"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/internal/socket"
	"github.com/minicri/minicri/sandbox"
)

// Options say where and how sessions are served.
type Options struct {
	Address    string // of TCP; port 0 is any
	TLS        TLS
	Idle       time.Duration // how long a session may be silent
	Creation   time.Duration // how long a client of exec or attach may take to open its streams
	MaxOpen    int           // bounds the requests, pending and open
	Containers *container.Store
	Pods       *sandbox.Store
	Dial       func(ctx context.Context, pod, network, address string) (net.Conn, error) // from within a pod
	Logger     *slog.Logger
}

// Server makes sessions and serves them. It may be used by many goroutines.
type Server struct {
	options     Options
	listener    net.Listener
	address     url.URL
	requests    *requests
	strangers   strangers
	descriptors *semaphore.Weighted // of all sessions, so that the rest of the daemon has enough
	base        context.Context     // ends when the server is closed, and with it all sessions
	cancel      context.CancelFunc
}

// Listen opens the listener; Serve then serves it.
func Listen(ctx context.Context, options Options) (*Server, error) {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", options.Address)
	if err != nil {
		return nil, fmt.Errorf("listen for exec, attach and port-forward (streaming.address): %w", err)
	}
	var limit unix.Rlimit
	_ = unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) // cannot fail
	s := &Server{
		options: options, requests: newRequests(options.MaxOpen),
		descriptors: semaphore.NewWeighted(int64(min(limit.Cur/2, 1<<16))),
		address:     url.URL{Scheme: "http", Host: reachable(listener.Addr())},
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
	s.listener = socket.Steady(listener)
	return s, nil
}

// reachable returns the address that clients on this machine, such as the kubelet, dial.
func reachable(address net.Addr) string {
	tcp := *address.(*net.TCPAddr)
	if tcp.IP.IsUnspecified() && tcp.IP.To4() != nil {
		tcp.IP = net.IPv4(127, 0, 0, 1)
	} else if tcp.IP.IsUnspecified() {
		tcp.IP = net.IPv6loopback
	}
	return tcp.String()
}

// headerTime and headerSize bound a client's request.
const (
	headerTime = 5 * time.Second
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

// Close ends all sessions and their execs, and waits for them.
func (s *Server) Close() error {
	s.cancel()
	err := s.listener.Close()
	s.requests.close()
	if errors.Is(err, net.ErrClosed) { // http.Server was faster
		return nil
	}
	return err
}

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
	defer s.requests.end()
	if !s.descriptors.TryAcquire(sessionDescriptors) {
		http.Error(w, errNoDescriptors.Error(), http.StatusServiceUnavailable)
		return
	}
	defer s.descriptors.Release(sessionDescriptors)
	s.session(w, r, asked)
}

// sessionDescriptors are the connection and the three streams of a process.
const sessionDescriptors = 4

var errNoDescriptors = fmt.Errorf("no descriptors are left for streaming sessions: %w", errdefs.ErrResourceExhausted)

// Open counts the sessions that have not ended.
func (s *Server) Open() int {
	s.requests.mu.Lock()
	defer s.requests.mu.Unlock()
	return s.requests.open
}

const tokenLife = time.Minute

// The kinds of requests, as in their URLs.
const (
	kindExec        = "exec"
	kindAttach      = "attach"
	kindPortForward = "portforward"
)

// request is what a URL stands for.
type request struct {
	kind    string
	target  string                // the ID of a container, or of a sandbox for port-forward
	options remotecommand.Options // of exec and attach
	command []string              // of exec
	ports   []int32               // of port-forward over a WebSocket with channels
	expires time.Time             // set by add
}

type requests struct {
	limit    int // of pending and open
	mu       sync.Mutex
	pending  map[string]request // whose client has not come yet, by token
	open     int                // sessions
	closed   bool
	sessions sync.WaitGroup
}

func newRequests(limit int) *requests {
	return &requests{limit: limit, pending: make(map[string]request)}
}

func (r *requests) add(one request) (token string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return "", fmt.Errorf("exec, attach and port-forward are not served any more: %w", errdefs.ErrUnavailable)
	}
	maps.DeleteFunc(r.pending, func(_ string, p request) bool { return time.Now().After(p.expires) })
	if len(r.pending)+r.open >= r.limit {
		return "", fmt.Errorf("%d requests to exec, attach or port-forward are open, which is the limit (streaming.max_open): %w", r.limit, errdefs.ErrResourceExhausted)
	}
	token = rand.Text()
	one.expires = time.Now().Add(tokenLife)
	r.pending[token] = one
	return token, nil
}

// take uses up a token and counts a session, for which the caller calls end.
func (r *requests) take(token string) (one request, found bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	one, found = r.pending[token]
	delete(r.pending, token)
	if !found || time.Now().After(one.expires) {
		return request{}, false
	}
	r.open++
	r.sessions.Add(1)
	return one, true
}

func (r *requests) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.open--
	r.sessions.Done()
}

// close drops pending requests, takes no more, and waits for the sessions.
func (r *requests) close() {
	r.mu.Lock()
	r.closed = true
	clear(r.pending)
	r.mu.Unlock()
	r.sessions.Wait()
}

// TLS says how sessions are secured; the zero value does not secure them.
type TLS struct {
	Cert, Key  string // PEM files, read anew for each connection, so that they can be replaced
	SelfSigned bool   // make a certificate that lasts as long as the daemon
}

// Check returns an error if the files cannot be used.
func (t TLS) Check() error {
	_, err := t.load()
	return err
}

// load reads the files. It returns nil if none are named.
func (t TLS) load() (*tls.Certificate, error) {
	if t.Cert == "" {
		return nil, nil
	}
	certificate, err := tls.LoadX509KeyPair(t.Cert, t.Key)
	if err != nil {
		return nil, fmt.Errorf("read the certificate: %w", err)
	}
	return &certificate, nil
}

// Config returns nil without TLS. It fails if the files cannot be used.
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
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(now.UnixNano()), Subject: pkix.Name{CommonName: "minicri"}, IPAddresses: []net.IP{net.ParseIP(host)},
		NotBefore: now.Add(-time.Hour), NotAfter: now.AddDate(10, 0, 0), // clocks differ
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, err
}
