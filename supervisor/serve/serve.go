package serve

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/socket"
	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/bundle"
	"github.com/minicri/minicri/supervisor/launch"
	"github.com/minicri/minicri/supervisor/starter"
)

// What a supervisor waits for, at most, beside process.KillLimit.
const (
	operationLimit = 4 * time.Minute         // for each operation, whatever its caller says
	reapLimit      = 10 * time.Second        // for a busy parent to reap an adopted init
	reportLimit    = 2500 * time.Millisecond // for the daemon to report the status of an init that it has reaped
	abandonAfter   = 5 * time.Second         // for a start that hangs in a hook, when its container has ended
	requestLimit   = 5 * time.Second         // for the request of a stream or an exec
	drainLimit     = 500 * time.Millisecond  // for the last output to be in the log
	barrierLimit   = 100 * time.Millisecond  // for an init behind its barrier to become the program
	lastAnswer     = time.Second             // for answers under way when it ends
	adoptedPause   = 2 * time.Millisecond    // between two looks at an init that is not our child
	stdinPause     = time.Second             // between two looks at a client whose input the process does not take
)

// Serve configures the supervisor of the pods that one build has made.
type Serve struct {
	Dir           string   // the group's directory, absolute
	SystemdCgroup bool     // cgroupsPath is slice:prefix:name, made by systemd
	Build         string   // of this program, by its content
	Version       string   // of the daemon that starts it
	Ready         *os.File // gets "ready\n" once the sockets serve, then is closed; may be nil
}

// ownOOMScore keeps the supervisor alive when memory runs out, as containerd and CRI-O do for theirs.
const ownOOMScore = "-998"

// Supervisor serves one directory. The package comment has its lock order.
type Supervisor struct {
	dir              string
	systemd          bool
	log              *slog.Logger
	events           *broker
	parent           *process.Parent
	starters         *starter.Starters
	launcher         *launch.Launcher
	control, streams net.Listener
	execs            net.Listener
	followers        atomic.Int32
	life             context.Context    // ends with Run
	stop             context.CancelFunc // ends Run

	mu         sync.Mutex
	containers map[string]*container
	oomClaims  map[string]int // by cgroup: OOM kills found to be those of single containers below it
	oomSeen    map[string]int // by cgroup: what it had counted when all claims were made
	deleted    []string       // the last ids that a Delete did not find
}

// maxDeleted is more than the deletions that can overtake one creation.
const maxDeleted = 1024

// Run serves until ctx is cancelled or Shutdown is called. Containers live on: the next Run adopts them.
func (s Serve) Run(ctx context.Context, log *slog.Logger) error {
	debug.SetGCPercent(50) // half the default: the supervisor allocates little, and pods need the memory
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	if err := s.enter(log); err != nil {
		return err
	}
	runtime.GOMAXPROCS(min(runtime.NumCPU(), 4)) // to move logs; the environment's 1 is for inits
	lock, err := api.Lock(s.Dir)
	if err != nil {
		return err
	}
	defer lock.Close()
	sup := &Supervisor{
		dir: s.Dir, systemd: s.SystemdCgroup, log: log, events: newBroker(), life: ctx, stop: stop,
		containers: make(map[string]*container), oomClaims: make(map[string]int), oomSeen: make(map[string]int),
	}
	if err := sup.open(api.About{Build: s.Build, Version: s.Version, Protocol: api.Protocol, Records: api.RecordVersion}); err != nil {
		return err
	}
	defer sup.starters.Close()
	if err := sup.adoptAll(); err != nil {
		return err
	}
	go sup.parent.Run(ctx)
	go sup.starters.Prepare() // ends with the fork
	return sup.serve(ctx, s.Ready)
}

func (s *Supervisor) open(about api.About) (err error) {
	if old, _ := api.ReadAbout(s.dir); old == nil || *old != about {
		if err = bundle.WriteJSON(filepath.Join(s.dir, api.AboutFile), about); err != nil {
			return fmt.Errorf("write which build serves: %w", err)
		}
	}
	if s.control, err = listen(filepath.Join(s.dir, api.ControlSocket)); err != nil {
		return err
	}
	if s.streams, err = listen(filepath.Join(s.dir, api.StreamSocket)); err != nil {
		return err
	}
	if s.execs, err = listen(filepath.Join(s.dir, api.ExecSocket)); err != nil {
		return err
	}
	if s.parent, err = process.NewParent(); err != nil {
		return err
	}
	s.launcher = launch.New(s.parent)
	s.starters, err = starter.New(s.parent, s.log)
	return err
}

// enter makes the process fit to outlive the daemon.
func (s Serve) enter(log *slog.Logger) error {
	for _, dir := range []string{statesDir, runtimesDir, api.RecordDir, api.StreamDir, api.ExitDir} {
		if err := os.MkdirAll(filepath.Join(s.Dir, dir), 0o700); err != nil {
			return fmt.Errorf("make the supervisor's directories: %w", err)
		}
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	// Starters and hooks must not inherit what the daemon has left open.
	open, err := os.ReadDir("/proc/self/fd")
	for _, descriptor := range open {
		if number, _ := strconv.Atoi(descriptor.Name()); number > 2 {
			unix.CloseOnExec(number)
		}
	}
	if err != nil {
		return err
	}
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte(ownOOMScore), 0); err != nil {
		log.Info("oom_score_adj stays as it is", "wanted", ownOOMScore, "error", err)
	}
	if _, err := unix.Setsid(); err != nil && !errors.Is(err, unix.EPERM) { // EPERM: leads its session already
		return fmt.Errorf("lead a session: %w", err)
	}
	return nil
}

func (s *Supervisor) serve(ctx context.Context, ready *os.File) error {
	server, err := ttrpc.NewServer(ttrpc.WithUnaryServerInterceptor(mapErrors))
	if err != nil {
		return err
	}
	api.RegisterShimService(server, service{s})
	if ready != nil {
		_, _ = ready.WriteString(api.Ready)
		_ = ready.Close()
	}
	go accept(s.streams, s.serveStream)
	go accept(s.execs, s.serveExec)
	failed := make(chan error, 1)
	// Calls that are under way are answered, so they do not end with ctx.
	go func() { failed <- server.Serve(context.WithoutCancel(ctx), s.control) }()
	select {
	case err := <-failed:
		return fmt.Errorf("serve: %w", err)
	case <-ctx.Done():
	}
	_, _, _ = s.control.Close(), s.streams.Close(), s.execs.Close() // from now on no supervisor serves
	// ttrpc takes a connection for idle before it has written the last answer.
	time.Sleep(lastAnswer / 10)
	grace, cancel := context.WithTimeout(context.Background(), lastAnswer)
	defer cancel()
	_ = server.Shutdown(grace)
	return server.Close()
}

// listen replaces a stale socket: the caller holds the directory's lock.
func listen(path string) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	return socket.ListenPrivate(path)
}

func (s *Supervisor) reserve(c *container) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.containers[c.record.ID] != nil {
		return fmt.Errorf("create container %s: %w", c.record.ID, errdefs.ErrAlreadyExists)
	}
	if slices.Contains(s.deleted, c.record.ID) {
		return fmt.Errorf("create container %s: it was deleted before: %w", c.record.ID, errdefs.ErrAborted)
	}
	s.containers[c.record.ID] = c
	return nil
}

// toDelete returns a container. It refuses the creation of an id that it does not find: ttrpc serves each request in its
// own goroutine, so a Delete can overtake the Create that its caller has given up.
func (s *Supervisor) toDelete(id string) *container {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.containers[id]
	if c == nil && !slices.Contains(s.deleted, id) {
		s.deleted = append(s.deleted[max(0, len(s.deleted)-maxDeleted+1):], id)
	}
	return c
}

// forget drops a container, and the counts of cgroups that are gone.
func (s *Supervisor) forget(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.containers, id)
	gone := func(parent string, _ int) bool {
		_, err := os.Stat(parent)
		return errors.Is(err, os.ErrNotExist)
	}
	maps.DeleteFunc(s.oomClaims, gone)
	maps.DeleteFunc(s.oomSeen, gone)
}

// find returns a container whose creation is over: before, it has nothing that could be used.
func (s *Supervisor) find(id string) (*container, error) {
	switch c := s.get(id); {
	case c == nil:
		return nil, fmt.Errorf("container %s: %w", id, errdefs.ErrNotFound)
	case !isClosed(c.created):
		return nil, fmt.Errorf("container %s is being created: %w", id, errdefs.ErrFailedPrecondition)
	default:
		return c, nil
	}
}

func (s *Supervisor) get(id string) *container {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.containers[id]
}

func (s *Supervisor) all() []*container {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.containers))
}

func isClosed(c chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func (s *Supervisor) recordPath(id string) string {
	return filepath.Join(s.dir, api.RecordDir, id+".json")
}

func (c *container) writeRecord() error {
	record := c.snapshot()
	return bundle.WriteJSON(c.sup.recordPath(record.ID), record)
}

func (s *Supervisor) exitPath(id string) string {
	return filepath.Join(s.dir, api.ExitDir, id+".json")
}
