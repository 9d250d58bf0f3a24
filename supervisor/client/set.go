package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/supervisor/api"
)

// Set are the supervisors of a node, one for each group: the pods that one build has made, which names the group.
// mu guards the map; a group's lock is held while its supervisor is started or connected to. Callers wait for it up to
// their own deadlines.
type Set struct {
	options SetOptions
	answer  atomic.Int64 // how long a supervisor may take to answer, as a time.Duration

	base   context.Context // ends with Close, and with it the goroutines of work
	cancel context.CancelFunc
	work   sync.WaitGroup

	mu       sync.Mutex
	groups   map[string]*group
	follower Follower
}

// SetOptions say where supervisors are and how they are started.
type SetOptions struct {
	Dir    string        // has a directory for each group
	Start  StartOptions  // all but Dir
	Answer time.Duration // how long a supervisor may take to answer; see SetAnswer
	Host   Host          // nil stands for Processes
	Logger *slog.Logger
}

// Follower receives what supervisors report, in a goroutine for each group.
type Follower interface {
	Noted(event *api.Event)                  // for each event
	Missed(group string, supervisor *Client) // when events were dropped: List has the present state
	Lost(group string, err error)            // when the connection to a supervisor is gone
}

// group is the connection to one supervisor; nil client if there is none.
type group struct {
	dir       string
	lock      *semaphore.Weighted
	client    *Client
	followed  bool
	failed    error // why its last start failed
	pause     time.Duration
	notBefore time.Time // the next start
}

// NewSet makes a set whose supervisors, and their logs, are followed until Close.
func NewSet(options SetOptions) (*Set, error) {
	if err := os.MkdirAll(options.Dir, 0o711); err != nil {
		return nil, err
	}
	if options.Host == nil {
		options.Host = Processes{}
	}
	s := &Set{options: options, groups: make(map[string]*group)}
	s.SetAnswer(options.Answer)
	s.base, s.cancel = context.WithCancel(context.Background())
	s.work.Go(s.passLogsOn)
	return s, nil
}

// SetAnswer changes how long a supervisor may take to answer, from the next question on.
func (s *Set) SetAnswer(limit time.Duration) { s.answer.Store(int64(limit)) }

// Follow sets the receiver of events, once. From a supervisor's next Ensure on it gets those that are kept, and all later.
func (s *Set) Follow(follower Follower) {
	s.mu.Lock()
	s.follower = follower
	s.mu.Unlock()
}

// Dir is the directory of a group's supervisor.
func (s *Set) Dir(group string) string { return filepath.Join(s.options.Dir, group) }

func (s *Set) of(name string) *group {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.groups[name]
	if g == nil {
		g = &group{dir: s.Dir(name), lock: semaphore.NewWeighted(1)}
		s.groups[name] = g
	}
	return g
}

// Connect returns the connection to the group's supervisor, and errdefs.ErrUnavailable if none serves.
func (s *Set) Connect(ctx context.Context, name string) (*Client, error) {
	g := s.of(name)
	return g.locked(ctx, func() (*Client, error) { return g.connect(ctx, s) })
}

// locked calls do under the group's lock. The caller leaves when ctx ends; do goes on and keeps the lock until it
// returns, so that those who ask next have its outcome.
func (g *group) locked(ctx context.Context, do func() (*Client, error)) (*Client, error) {
	late := func() error {
		return fmt.Errorf("wait for the supervisor of build %s: %w", filepath.Base(g.dir), context.Cause(ctx))
	}
	if g.lock.Acquire(ctx, 1) != nil {
		return nil, late()
	}
	type outcome struct {
		supervisor *Client
		err        error
	}
	done := make(chan outcome, 1)
	go func() { // within the limits of connect and serving
		supervisor, err := do()
		g.lock.Release(1)
		done <- outcome{supervisor, err}
	}()
	select {
	case o := <-done:
		return o.supervisor, o.err
	case <-ctx.Done():
		return nil, late()
	}
}

// connect is Connect; the lock is held.
func (g *group) connect(ctx context.Context, s *Set) (*Client, error) {
	if g.client != nil {
		if !g.client.broken() {
			return g.client, nil
		}
		_ = g.client.Close()
		g.client = nil
	}
	if err := s.Known(filepath.Base(g.dir)); err != nil {
		return nil, err
	}
	connected, err := connect(ctx, s.options.Host, g.dir, &s.answer)
	if err != nil {
		return nil, err
	}
	if err := connected.greet(ctx, s.options); err != nil {
		return nil, errors.Join(err, connected.Close())
	}
	g.client, g.followed = connected, false
	return connected, nil
}

// Ensure returns the connection to the group's supervisor. It starts one if none serves.
func (s *Set) Ensure(ctx context.Context, name string) (*Client, error) {
	g := s.of(name)
	return g.locked(ctx, func() (*Client, error) {
		supervisor, err := s.serving(ctx, g)
		if err != nil {
			return nil, err
		}
		if !g.followed {
			g.followed = s.follow(name, supervisor)
		}
		return supervisor, nil
	})
}

// Call asks a group's supervisor, and its successor if it dies meanwhile, perhaps killed because it hung. repeated
// reports whether one has died: it may have done what it was asked for.
func (s *Set) Call(ctx context.Context, name string, do func(*Client) error) (repeated bool, err error) {
	for try := range 3 { // as many supervisors may die over one call
		if try > 0 {
			time.Sleep(RetryPause) // until it is noticed that the connection is gone
		}
		supervisor, ensureErr := s.Ensure(ctx, name)
		if ensureErr != nil {
			return repeated, errors.Join(err, ensureErr)
		}
		if err = do(supervisor); !errors.Is(err, ErrLost) {
			return repeated, err
		}
		repeated = true
	}
	return repeated, err
}

// Delete has a supervisor kill and delete a container. It is no error if none serves, or there is no such container.
func (s *Set) Delete(ctx context.Context, name, id string) error {
	_, err := s.Connect(ctx, name)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ECONNREFUSED) {
		return nil
	}
	if err == nil || errors.Is(err, ErrLost) {
		_, err = s.Call(ctx, name, func(supervisor *Client) error { return supervisor.Delete(ctx, id, true) })
	}
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

// follow passes on the events of a supervisor, in a goroutine that ends with it or with the set. It returns
// false before Follow: the undo of a pod may be the first that asks for a supervisor.
func (s *Set) follow(name string, supervisor *Client) bool {
	s.mu.Lock()
	follower := s.follower
	s.mu.Unlock()
	if follower == nil {
		return false
	}
	s.work.Go(func() {
		last := uint64(0)
		err := supervisor.Events(s.base, 0, func(event *api.Event) error {
			if event.GetSeq() != last+1 {
				follower.Missed(name, supervisor)
			}
			last = event.GetSeq()
			follower.Noted(event)
			return nil
		})
		if s.base.Err() != nil {
			return
		}
		g := s.of(name)
		if g.lock.Acquire(s.base, 1) != nil {
			return
		}
		if g.client == supervisor { // nothing comes over it any more
			_ = supervisor.Close()
			g.client = nil
		}
		g.lock.Release(1)
		follower.Lost(name, err)
	})
	return true
}

// Groups lists those that have a directory.
func (s *Set) Groups() ([]string, error) { return groupsIn(s.options.Dir) }

func groupsIn(dir string) (names []string, err error) {
	entries, err := os.ReadDir(dir)
	for _, entry := range entries {
		if entry.IsDir() {
			names = append(names, entry.Name())
		}
	}
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return names, err
}

// ExitOf reads what a supervisor wrote about a container's end, nil if nothing can be decoded.
func (s *Set) ExitOf(name, id string) (*api.ExitRecord, error) {
	data, err := os.ReadFile(filepath.Join(s.Dir(name), api.ExitDir, id+".json"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read how container %s has ended: %w", id, err)
	}
	exit := new(api.ExitRecord)
	if json.Unmarshal(data, exit) != nil {
		return nil, nil
	}
	return exit, nil
}

// Close ends the connections; the supervisors live on.
func (s *Set) Close() {
	s.cancel()
	s.work.Wait()
	s.mu.Lock()
	groups := slices.Collect(maps.Values(s.groups))
	s.mu.Unlock()
	for _, g := range groups {
		if g.lock.TryAcquire(1) { // else a call is under way that the daemon does not wait for
			if g.client != nil {
				_ = g.client.Close()
			}
			g.lock.Release(1)
		}
	}
}
