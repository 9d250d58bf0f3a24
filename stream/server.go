package stream

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"time"

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
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", options.Address)
	if err != nil {
		return nil, fmt.Errorf("listen for exec, attach and port-forward (streaming.address): %w", err)
	}
	s := &Server{
		options: options, requests: newRequests(options.MaxOpen), descriptors: descriptors{limit: descriptorLimit()},
		address: url.URL{Scheme: "http", Host: reachable(listener.Addr())},
	}
	s.base, s.cancel = context.WithCancel(context.WithoutCancel(ctx))
	config, err := options.TLS.config(s.address.Hostname())
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
