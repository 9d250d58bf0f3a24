// Package inspect shows people what a node is doing: the lives of its pods, their
// state and costs, and what the daemon itself is doing. A daemon serves it on a
// socket that is for root alone (DebugSocket), and Files answers from the files
// where none runs. It changes nothing but what `minicri check --fix` and `minicri
// image` ask for, keeps no state, and waits for no lock of a pod. Secrets are left out by packages
// timeline and redact.
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
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/internal/timeline"
)

// DebugSocket is the path of the socket below a daemon's volatile directory.
func DebugSocket(state string) string { return filepath.Join(state, "debug.sock") }

// Server answers questions about a daemon over HTTP, on a unix socket.
type Server struct {
	Node   *Node
	Images *image.Store
	// Logger and Enter are those of ImageRoutes.
	Logger *slog.Logger
	Enter  func() (leave func(), err error)
	// Metrics answers a scrape, whether there is an address for that or not.
	Metrics http.Handler
}

// lastRequests is how long requests may take to end once they are cancelled.
const lastRequests = 2 * time.Second

// Serve answers on the listener until the context ends, and then waits for the requests,
// which end with it:
//
//	/timelines?pod=NAME    the lives of pods, as JSON
//	/pods                  all pods at a glance, as JSON
//	/snapshots/orphans     the keys of snapshots that no container explains, as JSON;
//	                       DELETE /snapshots/orphans/KEY removes one
//	/images...             see ImageRoutes
//	/goroutines            the stacks of all goroutines
//	/metrics               the metrics of Prometheus
//	/debug/pprof/          profiles, as net/http/pprof has them
func (s *Server) Serve(ctx context.Context, listener net.Listener) error {
	server := &http.Server{Handler: s.routes(), ReadHeaderTimeout: 10 * time.Second, BaseContext: func(net.Listener) context.Context { return ctx }}
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

// Stop ends a server whose requests are over or cancelled, when they have ended or after
// the limit.
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
	mux.HandleFunc("GET /snapshots/orphans", func(w http.ResponseWriter, r *http.Request) {
		keys, err := s.Node.Containers.SnapshotsWithoutContainer(r.Context())
		answer(w, keys, err)
	})
	mux.HandleFunc("DELETE /snapshots/orphans/{key}", func(w http.ResponseWriter, r *http.Request) {
		answer(w, nil, s.Node.Containers.RemoveSnapshot(r.Context(), r.PathValue("key")))
	})
	ImageRoutes(mux, s.Images, s.Logger, s.Enter)
	mux.HandleFunc("GET /goroutines", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(goroutines()) })
	mux.Handle("GET /metrics", s.Metrics)
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	return mux
}

func answer(w http.ResponseWriter, value any, err error) {
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(value) // nobody reads on
}

// goroutines are the stacks of all goroutines of this process, as a panic has
// them.
func goroutines() []byte {
	for size := 1 << 20; ; size *= 2 {
		buffer := make([]byte, size)
		if n := runtime.Stack(buffer, true); n < size {
			return buffer[:n]
		}
	}
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

// NewClientBy asks who answers where dial leads to.
func NewClientBy(name string, dial func(context.Context) (net.Conn, error)) Client {
	// A client that forgets to close leaves nothing open.
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) }}
	return Client{name, &http.Client{Transport: transport}, answerLimit}
}

// ErrNoAnswer is the error of a daemon that is there and does not answer.
var ErrNoAnswer = errors.New("the daemon does not answer")

// answerLimit is how long a daemon may take for an answer: one that is stopped or
// wedged gives none.
const answerLimit = 15 * time.Second

// Timelines are the pods that are asked for; see Node.Timelines.
func (c Client) Timelines(ctx context.Context, wanted string) (pods []timeline.Pod, err error) {
	err = c.JSON(ctx, "/timelines?pod="+url.QueryEscape(wanted), &pods)
	return pods, err
}

// Glance is Node.Glance.
func (c Client) Glance(ctx context.Context) (g *timeline.Glance, err error) {
	err = c.JSON(ctx, "/pods", &g)
	return g, err
}

// JSON reads what the daemon has at a path of Server.Serve.
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

// Read returns what the daemon has at a path of Server.Serve.
func (c Client) Read(ctx context.Context, path string) ([]byte, error) {
	return c.do(ctx, http.MethodGet, path)
}

// Delete removes what the daemon has at a path of Server.Serve.
func (c Client) Delete(ctx context.Context, path string) error {
	_, err := c.do(ctx, http.MethodDelete, path)
	return err
}

func (c Client) do(ctx context.Context, method, path string) (data []byte, err error) {
	limited, cancel := context.WithTimeout(ctx, c.limit)
	defer cancel()
	answer, err := c.Call(limited, method, path, http.NoBody)
	if err == nil {
		defer answer.Body.Close()
		data, err = io.ReadAll(answer.Body)
	}
	if limited.Err() != nil && ctx.Err() == nil {
		return nil, fmt.Errorf("%w: it serves %s, and has said nothing for %s; it is stopped or wedged", ErrNoAnswer, c.socket, c.limit)
	}
	return data, err
}

// Call asks without a limit of time. The caller closes the answer's body.
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

// query finds the pods that are asked for: an id or its beginning, a name,
// NAMESPACE/NAME, the same of a container, or "" for all; those that are there,
// and those that are gone or have failed.
func query(pods []timeline.Pod, lives *step.Lives, wanted string) ([]timeline.Pod, error) {
	past, err := lives.List()
	if err != nil {
		return nil, err
	}
	all := slices.DeleteFunc(join(pods, past), func(p timeline.Pod) bool { return !p.Matches(wanted) })
	for i := range all {
		all[i].Finish()
	}
	timeline.Newest(all)
	return all, nil
}

// join adds the lives to the pods: containers to theirs, the others by themselves.
func join(pods []timeline.Pod, past []step.Life) []timeline.Pod {
	index := make(map[string]int)
	for i, p := range pods {
		index[p.ID] = i
	}
	for _, life := range past {
		if _, there := index[life.ID]; life.Kind == "container" || there {
			continue
		}
		index[life.ID] = len(pods)
		pods = append(pods, podOf(life))
	}
	done := make(map[string]bool)
	for _, life := range past {
		if life.Kind != "container" || done[life.ID] {
			continue
		}
		done[life.ID] = true
		i, there := index[life.Pod]
		if !there {
			i, index[life.Pod] = len(pods), len(pods)
			pod := podOf(life)
			pod.Kind, pod.ID, pod.Rows, pod.Error, pod.Attempt = "pod", life.Pod, nil, "", 0
			pod.Name, pod.State = strings.TrimSuffix(life.Name, "/"+containerName(life)), timeline.Removed
			pods = append(pods, pod)
		}
		if !slices.ContainsFunc(pods[i].Containers, func(c timeline.Container) bool { return c.ID == life.ID }) {
			pods[i].Containers = append(pods[i].Containers, containerOf(life))
		}
	}
	return pods
}

func podOf(life step.Life) timeline.Pod {
	p := timeline.Pod{Kind: life.Kind, ID: life.ID, Name: life.Name, Attempt: life.Attempt, State: timeline.Removed, Error: life.Error, Rows: life.Rows}
	if life.Error != "" {
		p.State = timeline.Failed
	}
	if len(life.Network) > 0 {
		p.Network = &timeline.Network{Name: networkName(life.Network), Config: life.Network}
	}
	return p
}

func containerOf(life step.Life) timeline.Container {
	c := timeline.Container{ID: life.ID, Name: containerName(life), Attempt: life.Attempt, State: timeline.Removed, Error: life.Error, Rows: life.Rows}
	if life.Error != "" {
		c.State = timeline.Failed
	}
	return c
}

func containerName(life step.Life) string { return life.Name[strings.LastIndexByte(life.Name, '/')+1:] }
