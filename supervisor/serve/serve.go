package serve

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	gort "runtime"
	"runtime/debug"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/socket"
	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/children"
	"github.com/minicri/minicri/supervisor/launch"
	"github.com/minicri/minicri/supervisor/runtime"
	"github.com/minicri/minicri/supervisor/starter"
	"github.com/minicri/minicri/supervisor/stdio/journal"
)

// Serve is the resident supervisor of the pods that were made with one build.
type Serve struct {
	Dir           string   // the group's directory, absolute
	SystemdCgroup bool     // cgroupsPath is slice:prefix:name, made by systemd
	Build         string   // of this program, by its content
	Version       string   // of the daemon that starts it
	Ready         *os.File // gets "ready\n" once the sockets serve, then is closed; may be nil
}

// ownOOMScore keeps the supervisor alive when memory runs out, as containerd and
// CRI-O do for theirs.
const ownOOMScore = "-998"

// mostProcessors is how many of them may move bytes of the logs of a node at once.
const mostProcessors = 4

// answerGrace lets the answer to Shutdown out: ttrpc takes a
// connection for idle before it has written the last one.
const answerGrace = 100 * time.Millisecond

// Supervisor serves one directory. See the package for its lock rule.
type Supervisor struct {
	dir      string
	log      *slog.Logger
	events   *broker
	children *children.Children
	runtime  *runtime.Runtime
	journal  *journal.Journal
	about    api.About

	lock             *os.File
	control, streams net.Listener
	followers        atomic.Int32

	life context.Context    // ends with Run
	stop context.CancelFunc // ends Run

	mu         sync.Mutex
	containers map[string]*container
	cutOff     []*container   // their creation was, by the end of an earlier supervisor
	oomClaims  map[string]int // by cgroup: OOM kills found to be those of single containers below it
}

// garbagePercent is half of the Go runtime's default: the supervisor allocates little,
// and what it holds is taken from the node's pods.
const garbagePercent = 50

// Run serves until ctx is cancelled or Shutdown is called. Containers
// live on: the next Run on the same directory adopts them.
func (s Serve) Run(ctx context.Context, log *slog.Logger) error {
	debug.SetGCPercent(garbagePercent)
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	if err := s.enter(log); err != nil {
		return err
	}
	gort.GOMAXPROCS(min(gort.NumCPU(), mostProcessors)) // the environment's one is for inits
	sup := &Supervisor{
		dir: s.Dir, log: log, events: newBroker(),
		about: api.About{Build: s.Build, Version: s.Version, Protocol: api.Protocol, Records: api.RecordVersion}, life: ctx, stop: stop,
		containers: map[string]*container{}, oomClaims: map[string]int{},
	}
	if err := sup.open(); err != nil {
		return err
	}
	defer sup.lock.Close()
	defer sup.journal.Close()
	if err := sup.prepareRuntime(s.SystemdCgroup); err != nil {
		return err
	}
	defer sup.runtime.Starters.Close()
	if err := sup.adoptAll(); err != nil {
		return err
	}
	go sup.releaseJournal() // ends with the last log that can be opened
	go sup.children.Run(ctx)
	go sup.runtime.Starters.Prepare() // ends with the fork
	go sup.settleAll()                // ends with the last container that was adopted
	return sup.serve(ctx, s.Ready)
}

// prepareRuntime makes what all containers share.
func (s *Supervisor) prepareRuntime(systemd bool) (err error) {
	if s.children, err = children.New(); err != nil {
		return err
	}
	starters, err := starter.New(s.children, s.log)
	if err != nil {
		return err
	}
	s.runtime = &runtime.Runtime{Dir: s.dir, SystemdCgroup: systemd, Children: s.children, Starters: starters, Launcher: launch.New(s.children)}
	return nil
}

// journalFile is below the supervisor's directory. The number is the version of
// its form.
const journalFile = "journal.1"

// open takes the lock, the journal and the sockets.
func (s *Supervisor) open() (err error) {
	if s.lock, err = api.Lock(s.dir); err != nil {
		return err
	}
	if old, _ := api.ReadAbout(s.dir); old == nil || *old != s.about {
		if err = writeJSON(filepath.Join(s.dir, api.AboutFile), s.about); err != nil {
			return fmt.Errorf("write which build serves: %w", err)
		}
	}
	path := filepath.Join(s.dir, journalFile)
	s.journal, err = journal.Open(path)
	if err != nil && !isShortage(err) {
		s.log.Error("output that an earlier supervisor had read and not logged is lost: its journal cannot be opened, and is replaced", "error", err)
		if err = os.RemoveAll(path); err == nil {
			s.journal, err = journal.Open(path)
		}
	}
	if err != nil {
		return err
	}
	if s.control, err = listen(filepath.Join(s.dir, api.ControlSocket)); err != nil {
		return err
	}
	s.streams, err = listen(filepath.Join(s.dir, api.StreamSocket))
	return err
}

// enter makes the process fit to outlive the daemon.
func (s Serve) enter(log *slog.Logger) error {
	for _, dir := range []string{runtime.StatesDir, runtime.ProgramsDir, api.RecordDir, api.StreamDir, api.ExitDir} {
		if err := os.MkdirAll(filepath.Join(s.Dir, dir), 0o700); err != nil {
			return fmt.Errorf("make the supervisor's directories: %w", err)
		}
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	if err := keepInherited(); err != nil {
		return err
	}
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte(ownOOMScore), 0); err != nil {
		log.Info("oom_score_adj stays as it is", "wanted", ownOOMScore, "error", err)
	}
	if _, err := unix.Setsid(); err != nil && !errors.Is(err, unix.EPERM) { // EPERM: leads its session already
		return fmt.Errorf("setsid: %w", err)
	}
	return nil
}

// keepInherited keeps what the daemon had open when it was started, and left to us, from
// starters and from hooks.
func keepInherited() error {
	open, err := os.ReadDir("/proc/self/fd")
	for _, descriptor := range open {
		if number, _ := strconv.Atoi(descriptor.Name()); number > 2 {
			unix.CloseOnExec(number)
		}
	}
	return err
}

func (s *Supervisor) serve(ctx context.Context, ready *os.File) error {
	server, err := ttrpc.NewServer()
	if err != nil {
		return err
	}
	api.RegisterShimService(server, &service{s})
	if ready != nil {
		_, _ = ready.WriteString(api.Ready)
		_ = ready.Close()
	}
	go s.serveStreams(s.streams)
	failed := make(chan error, 1)
	// Calls that are under way are answered, so they do not end with ctx.
	go func() { failed <- server.Serve(context.WithoutCancel(ctx), s.control) }()
	select {
	case err := <-failed:
		return fmt.Errorf("serve: %w", err)
	case <-ctx.Done():
	}
	_, _ = s.control.Close(), s.streams.Close() // who comes now finds that no supervisor serves
	time.Sleep(answerGrace)
	grace, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = server.Shutdown(grace)
	return server.Close()
}

// follow is for a client that follows the events, as a daemon does as long as it lives.
// When the last one has gone, a supervisor that has no containers ends: with no daemon
// and no pods, nothing stays. A daemon that comes in that moment starts another one.
func (s *Supervisor) follow() (over func()) {
	s.followers.Add(1)
	return func() {
		if s.followers.Add(-1) == 0 && len(s.all()) == 0 {
			s.stop()
		}
	}
}

// listen replaces a stale socket: the caller holds the directory's lock.
func listen(path string) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	return socket.ListenPrivate(path)
}
