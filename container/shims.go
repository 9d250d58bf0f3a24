package container

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/shim/api"
	"github.com/minicri/minicri/shim/client"
)

// shims are the connections to the pods' shims, one for each pod that has
// containers. The map is guarded by mu; an entry has a lock of its own, held
// while its shim is started or looked for.
type shims struct {
	options client.StartOptions
	state   string

	mu   sync.Mutex
	pods map[string]*podShim
}

// podShim is the connection to one pod's shim; nil client if there is none.
type podShim struct {
	dir    string
	mu     sync.Mutex
	client *client.Client
	// lost is closed when the connection is gone.
	lost <-chan struct{}
	// followed is set once somebody reads the shim's events.
	followed bool
}

// use takes a new connection; mu is held.
func (p *podShim) use(connected *client.Client) *client.Client {
	p.client, p.lost, p.followed = connected, connected.Lost(), false
	return connected
}

func newShims(state, binary string, systemd bool) *shims {
	return &shims{state: state, options: client.StartOptions{Binary: binary, SystemdCgroup: systemd}, pods: make(map[string]*podShim)}
}

func (s *shims) dir(sandboxID string) string { return filepath.Join(s.state, "shims", sandboxID) }

func (s *shims) of(sandboxID string) *podShim {
	s.mu.Lock()
	defer s.mu.Unlock()
	pod := s.pods[sandboxID]
	if pod == nil {
		pod = &podShim{dir: s.dir(sandboxID)}
		s.pods[sandboxID] = pod
	}
	return pod
}

// connect returns the connection to the shim that serves the pod, and
// errdefs.ErrUnavailable if none does.
func (s *shims) connect(ctx context.Context, sandboxID string) (*client.Client, error) {
	pod := s.of(sandboxID)
	pod.mu.Lock()
	defer pod.mu.Unlock()
	return pod.connect(ctx)
}

func (p *podShim) connect(ctx context.Context) (*client.Client, error) {
	if p.client != nil {
		select {
		case <-p.lost:
			_ = p.client.Close()
			p.client = nil
		default:
			return p.client, nil
		}
	}
	connected, err := client.Connect(ctx, p.dir)
	if err != nil {
		return nil, err
	}
	return p.use(connected), nil
}

// ensure returns the connection to the pod's shim and starts one if need be. A
// shim that is started on the directory of one that died takes over its
// containers. A connection that nobody follows yet is given to follow.
func (s *shims) ensure(ctx context.Context, sandboxID string, follow func(*client.Client)) (*client.Client, error) {
	pod := s.of(sandboxID)
	pod.mu.Lock()
	defer pod.mu.Unlock()
	shim, err := pod.connect(ctx)
	if errdefs.IsUnavailable(err) {
		options := s.options
		options.Dir = pod.dir
		if shim, err = client.Start(ctx, options); err == nil {
			pod.use(shim)
		}
	}
	if err != nil {
		return nil, err
	}
	if !pod.followed {
		pod.followed = true
		follow(shim)
	}
	return shim, nil
}

// drop lets go of a connection over which nothing comes any more.
func (s *shims) drop(sandboxID string, shim *client.Client) {
	s.mu.Lock()
	pod := s.pods[sandboxID]
	s.mu.Unlock()
	if pod == nil {
		return // forgotten, with its connection
	}
	pod.mu.Lock()
	defer pod.mu.Unlock()
	if pod.client == shim {
		_ = shim.Close()
		pod.client = nil
	}
}

// forget drops the connection and the directory of a pod's shim, which has
// ended or is told to.
func (s *shims) forget(ctx context.Context, sandboxID string) error {
	pod := s.of(sandboxID)
	pod.mu.Lock()
	defer pod.mu.Unlock()
	shim, err := pod.connect(ctx)
	if err == nil {
		err = errors.Join(ignoreUnavailable(empty(ctx, shim)), ignoreUnavailable(shim.Shutdown(ctx)), shim.Close())
		pod.client = nil
	} else {
		err = ignoreUnavailable(err)
	}
	if err == nil {
		err = os.RemoveAll(pod.dir)
	}
	if err != nil {
		return fmt.Errorf("end the shim of sandbox %s: %w", sandboxID, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.pods, sandboxID)
	return nil
}

// empty takes from a shim what it adopted of containers that were removed while
// none served: with them it would not end.
func empty(ctx context.Context, shim *client.Client) error {
	left, err := shim.List(ctx)
	for _, c := range left {
		err = errors.Join(err, shim.Delete(ctx, c.GetId()))
	}
	return err
}

func ignoreUnavailable(err error) error {
	if errdefs.IsUnavailable(err) {
		return nil
	}
	return err
}

// close lets go of all shims.
func (s *shims) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, pod := range s.pods {
		if pod.client != nil {
			_ = pod.client.Close() // the shim lives on
		}
	}
}

// exitOf reads what the shim wrote of a container's end, nil if nothing.
func (s *shims) exitOf(sandboxID, id string) *api.ExitRecord {
	data, err := os.ReadFile(filepath.Join(s.dir(sandboxID), api.ExitDir, id+".json"))
	if err != nil {
		return nil
	}
	exit := &api.ExitRecord{}
	if err := json.Unmarshal(data, exit); err != nil {
		return nil
	}
	return exit
}
