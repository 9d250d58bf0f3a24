// Package inspect shows people the lives of a node's pods, their state and costs, and the daemon's own work. A daemon
// serves it on DebugSocket; Files answers where none runs. It changes only what `minicri image` asks for, keeps no
// state, and waits for no lock of a pod. Packages timeline and redact remove secrets.
package inspect

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"net/url"
	"path/filepath"
	runtimepprof "runtime/pprof"
	"strings"
	"syscall"
	"time"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/errtext"
	"github.com/minicri/minicri/internal/timeline"
)

// DebugSocket is the socket below a daemon's volatile directory.
func DebugSocket(state string) string { return filepath.Join(state, "debug.sock") }

// Server answers questions about a daemon over HTTP. Logger and Enter are those of ImageRoutes.
type Server struct {
	Node    *Node
	Images  *image.Store
	Logger  *slog.Logger
	Enter   func() (leave func(), err error)
	Metrics http.Handler
}

// lastRequests is how long cancelled requests may take to end.
const lastRequests = 2 * time.Second

// Serve answers until the context ends, and with it the requests:
//
//	/timelines?pod=NAME    the lives of pods, as JSON
//	/pods                  all pods at a glance, as JSON
//	/images...             see ImageRoutes
//	/goroutines            the stacks of all goroutines
//	/metrics               the metrics of Prometheus
//	/debug/pprof/          profiles, as net/http/pprof has them
func (s *Server) Serve(ctx context.Context, listener net.Listener) error {
	server := &http.Server{Handler: s.routes(), ReadHeaderTimeout: headerLimit, BaseContext: func(net.Listener) context.Context { return ctx }}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	select {
	case err := <-served:
		return fmt.Errorf("serve %s: %w", listener.Addr(), err)
	case <-ctx.Done():
		_ = Stop(server, lastRequests) // what is left then is cut off
		return nil
	}
}

// Stop closes a server when its requests have ended, or after the limit.
func Stop(server *http.Server, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	return errors.Join(server.Shutdown(ctx), server.Close())
}

func (s *Server) routes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /timelines", func(w http.ResponseWriter, r *http.Request) {
		pods, err := s.Node.Timelines(r.URL.Query().Get("pod"))
		answer(w, pods, err)
	})
	mux.HandleFunc("GET /pods", func(w http.ResponseWriter, r *http.Request) { answer(w, s.Node.Glance(r.Context()), nil) })
	ImageRoutes(mux, s.Images, s.Logger, s.Enter)
	mux.HandleFunc("GET /goroutines", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, stacks()) })
	mux.Handle("GET /metrics", s.Metrics)
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	return mux
}

func answer(w http.ResponseWriter, value any, err error) {
	if err != nil {
		http.Error(w, errtext.Of(err), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(value) // nobody reads on
}

func stacks() string {
	var b strings.Builder
	_ = runtimepprof.Lookup("goroutine").WriteTo(&b, 2) // no error of a Builder
	return b.String()
}

// Client asks a daemon.
type Client struct {
	socket string
	http   *http.Client
	limit  time.Duration
}

// NewClient asks the daemon that serves at a socket.
func NewClient(socket string) Client {
	return NewClientBy(socket, func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	})
}

// NewClientBy asks whom dial connects to.
func NewClientBy(name string, dial func(context.Context) (net.Conn, error)) Client {
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) }}
	return Client{name, &http.Client{Transport: transport}, answerLimit}
}

const (
	headerLimit = 10 * time.Second // for the headers of a request
	answerLimit = 15 * time.Second // for the daemon to say anything
)

// ErrNoAnswer is the error of a daemon that is stopped or wedged.
var ErrNoAnswer = errors.New("the daemon does not answer")

// Timelines is Node.Timelines.
func (c Client) Timelines(ctx context.Context, wanted string) (pods []timeline.Pod, err error) {
	err = c.JSON(ctx, "/timelines?pod="+url.QueryEscape(wanted), &pods)
	return pods, err
}

// Glance is Node.Glance.
func (c Client) Glance(ctx context.Context) (g *timeline.Glance, err error) {
	err = c.JSON(ctx, "/pods", &g)
	return g, err
}

// JSON decodes the answer at a path of Server.Serve.
func (c Client) JSON(ctx context.Context, path string, into any) error {
	data, err := c.Read(ctx, path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, into); err != nil {
		return fmt.Errorf("read the daemon's answer: %w", err)
	}
	return nil
}

// Read returns the answer at a path of Server.Serve.
func (c Client) Read(ctx context.Context, path string) (data []byte, err error) {
	limited, cancel := context.WithTimeout(ctx, c.limit)
	defer cancel()
	answer, err := c.Call(limited, http.MethodGet, path, http.NoBody)
	if err == nil {
		defer answer.Body.Close()
		data, err = io.ReadAll(answer.Body)
	}
	if limited.Err() != nil && ctx.Err() == nil {
		return nil, fmt.Errorf("%w: it serves %s, and has said nothing for %s; it is stopped or wedged", ErrNoAnswer, c.socket, c.limit)
	}
	return data, err
}

// Do makes a call without an answer.
func (c Client) Do(ctx context.Context, method, path string) error {
	answer, err := c.Call(ctx, method, path, http.NoBody)
	if err != nil {
		return err
	}
	return answer.Body.Close()
}

// Call asks without a time limit. The caller closes the answer's body.
func (c Client) Call(ctx context.Context, method, path string, body io.Reader) (*http.Response, error) {
	request, err := http.NewRequestWithContext(ctx, method, "http://minicri"+path, body)
	if err != nil {
		return nil, err
	}
	answer, err := c.http.Do(request)
	if wrapper := (*url.Error)(nil); errors.As(err, &wrapper) {
		err = wrapper.Err // without its URL, which names no real host
	}
	switch {
	case errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED):
		return nil, fmt.Errorf("no daemon serves %s: start it, or name its directory with --state: %w", c.socket, err)
	case err != nil:
		return nil, fmt.Errorf("ask the daemon at %s: %w", c.socket, err)
	case answer.StatusCode != http.StatusOK:
		defer answer.Body.Close()
		text, err := io.ReadAll(answer.Body)
		return nil, errors.Join(errors.New(strings.TrimSpace(string(text))), err)
	}
	return answer, nil
}
