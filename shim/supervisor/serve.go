package supervisor

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
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/socket"
	"github.com/minicri/minicri/shim/api"
	"github.com/minicri/minicri/shim/runtime"
	"github.com/minicri/minicri/shim/stdio"
	"github.com/minicri/minicri/shim/stdio/journal"
)

// Serve is the resident supervisor of a group of pods.
type Serve struct {
	Dir           string   // the group's directory, absolute
	SystemdCgroup bool     // cgroupsPath is slice:prefix:name, made by systemd
	Cgroups       []string // cgroup directories to move into first
	Build         string   // what Info answers
	Ready         *os.File // gets "ready\n" once the sockets serve, then is closed; may be nil
	Handover      *os.File // what an upgrade has handed over; nil if there was none
}

// ownOOMScore keeps the shim alive when memory runs out, as containerd and
// CRI-O do for theirs.
const ownOOMScore = "-998"

// mostProcessors is how many of them may move bytes of the logs of a node at once.
const mostProcessors = 4

// processors: one is enough for the supervisor of a pod, and saves 0.4 MiB of each.
func (s Serve) processors() int {
	if filepath.Base(s.Dir) != api.NodeGroup {
		return 1
	}
	return min(gort.NumCPU(), mostProcessors)
}

// answerGrace lets the answer to Shutdown out: ttrpc takes a
// connection for idle before it has written the last one.
const answerGrace = 100 * time.Millisecond

// Supervisor serves one directory. See the package for its lock rule.
type Supervisor struct {
	dir        string
	log        *slog.Logger
	events     *broker
	builtin    *runtime.Builtin
	taskEvents *runtime.Events
	journal    *journal.Journal
	shared     *stdio.Shared // of all streams
	systemd    bool          // the cgroup driver
	build      string
	paused     time.Duration // how long the upgrade that has brought this build has held output up

	lock             *os.File
	control, streams net.Listener
	upgrading        sync.Mutex
	changes          sync.RWMutex // read-held while what an upgrade hands over is changed
	logsHang         atomic.Bool  // an adopted container's log takes long to be opened

	life context.Context    // ends with Run
	stop context.CancelFunc // ends Run

	mu         sync.Mutex
	containers map[string]*container
	programs   map[string]runtime.Runtime // by program and flags
	oomClaims  map[string]int             // by cgroup: OOM kills found to be those of single containers below it
}

// startGCPercent has no garbage collected before the supervisor serves, as a rule: the
// first 16 MiB. From then on trimMemory decides.
const startGCPercent = 400

// Run serves until ctx is cancelled or Shutdown is called. Containers
// live on: the next Run on the same directory adopts them.
func (s Serve) Run(ctx context.Context, log *slog.Logger) error {
	debug.SetGCPercent(startGCPercent)
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	if err := s.enter(log); err != nil {
		return err
	}
	gort.GOMAXPROCS(s.processors()) // the environment's one is for inits
	sup := &Supervisor{
		dir: s.Dir, log: log, events: newBroker(), builtin: runtime.NewBuiltin(filepath.Join(s.Dir, stateDir), s.SystemdCgroup), systemd: s.SystemdCgroup,
		build: s.Build, life: ctx, stop: stop,
		containers: map[string]*container{}, programs: map[string]runtime.Runtime{}, oomClaims: map[string]int{},
	}
	handed, err := sup.open(s.Handover)
	if err != nil {
		return err
	}
	defer sup.lock.Close()
	defer sup.journal.Close()
	if sup.taskEvents, err = runtime.ListenForEvents(filepath.Join(s.Dir, eventSocket)); err == nil {
		err = sup.adoptAll(handed)
	}
	handed.closeRest()
	if err != nil {
		return err
	}
	if sup.logsHang.Load() {
		go sup.releaseHanded(handed.Outputs) // ends with the last log that can be opened
	} else {
		sup.releaseHanded(handed.Outputs) // we have our own by now
	}
	if s.Handover != nil {
		sup.builtin.ReapRest()
		log.Info("upgraded", "build", s.Build, "output held up", sup.paused, "serves after", handed.pause(), "containers", len(sup.all()))
	}
	go sup.builtin.Run(ctx)
	go sup.settleAll() // ends with the last container that was adopted
	go trimMemory(ctx)
	return sup.serve(ctx, s.Ready)
}

// eventSocket is where containerd's shims publish.
const eventSocket = "events.sock"

// journalFile is below the supervisor's directory. The number is the version of
// its form.
const journalFile = "journal.1"

// open takes the lock, the sockets and the journal: those of the build before,
// or new ones.
func (s *Supervisor) open(from *os.File) (h *handover, err error) {
	h = &handover{}
	if from != nil {
		if h, err = readHandover(from); err != nil {
			return nil, err
		}
		_ = from.Close()
		for _, fd := range h.Outputs {
			unix.CloseOnExec(fd)
		}
	}
	if s.lock = inherited(h.Lock, "lock"); s.lock == nil {
		if s.lock, err = lockDir(s.dir); err != nil {
			return nil, err
		}
	}
	if s.journal, err = journal.OpenOrReplace(filepath.Join(s.dir, journalFile)); err != nil {
		return nil, err
	}
	s.shared = &stdio.Shared{Journal: s.journal}
	if err := s.journal.Unread(); err != nil {
		s.log.Error("output that an earlier supervisor had read and not logged is lost: its journal was replaced", "error", err)
	}
	if s.control, err = listenOr(h.Control, filepath.Join(s.dir, api.ControlSocket)); err != nil {
		return nil, err
	}
	s.streams, err = listenOr(h.Streams, filepath.Join(s.dir, api.StreamSocket))
	return h, err
}

// listenOr takes a socket that was handed over, or makes it.
func listenOr(fd int, path string) (net.Listener, error) {
	file := inherited(fd, path)
	if file == nil {
		return listen(path)
	}
	defer file.Close() // FileListener has its own
	// Clients ask the socket which process they talk to (SO_PEERCRED of unix(7)):
	// the one that has called listen(2) last.
	if err := unix.Listen(fd, unix.SOMAXCONN); err != nil {
		return nil, fmt.Errorf("%s: %w", path, os.NewSyscallError("listen", err))
	}
	return net.FileListener(file)
}

// runtimeOf is the runtime that the container was made with, or is to be.
func (s *Supervisor) runtimeOf(r record) runtime.Runtime {
	if len(r.Runtime) == 0 {
		return s.builtin
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	key := strings.Join(r.Runtime, "\x00")
	program := s.programs[key]
	if program == nil {
		// Runtimes do not read each other's states.
		name := filepath.Base(r.Runtime[0])
		if r.Task {
			program = runtime.NewTask(r.Runtime, filepath.Join(s.dir, tasksDir, name), s.systemd, s.builtin, s.taskEvents)
		} else {
			program = runtime.NewCommand(r.Runtime, filepath.Join(s.dir, commandsDir, name), s.systemd, s.builtin)
		}
		s.programs[key] = program
	}
	return program
}

// stateDir is libcontainer's; commandsDir and tasksDir have those of other
// runtimes, below the supervisor's directory.
const (
	stateDir    = "containers"
	commandsDir = "oci"
	tasksDir    = "task"
)

func (s *Supervisor) stateDir() string { return filepath.Join(s.dir, stateDir) }

// enter makes the process fit to outlive the daemon.
func (s Serve) enter(log *slog.Logger) error {
	for _, dir := range []string{stateDir, commandsDir, "records", api.StreamDir, api.ExitDir} {
		if err := os.MkdirAll(filepath.Join(s.Dir, dir), 0o700); err != nil {
			return fmt.Errorf("make the shim's directory: %w", err)
		}
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	for _, cgroup := range s.Cgroups {
		if err := os.WriteFile(filepath.Join(cgroup, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0); err != nil {
			return fmt.Errorf("move the shim to its cgroup: %w", err)
		}
	}
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte(ownOOMScore), 0); err != nil {
		log.Info("oom_score_adj stays as it is", "wanted", ownOOMScore, "error", err)
	}
	if _, err := unix.Setsid(); err != nil && !errors.Is(err, unix.EPERM) { // EPERM: leads its session already
		return fmt.Errorf("setsid: %w", err)
	}
	return nil
}

// lockDir makes sure that one supervisor serves a directory. The lock ends with the
// process.
func lockDir(dir string) (*os.File, error) {
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock: %w", err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = lock.Close()
		return nil, fmt.Errorf("another shim serves %s: %w", dir, err)
	}
	return lock, nil
}

func (s *Supervisor) serve(ctx context.Context, ready *os.File) error {
	server, err := ttrpc.NewServer(ttrpc.WithUnaryServerInterceptor(s.gate))
	if err != nil {
		return err
	}
	api.RegisterShimService(server, &service{s})
	if ready != nil {
		_, _ = ready.WriteString(serves)
		_ = ready.Close()
	}
	go s.serveStreams(s.streams)
	failed := make(chan error, 1)
	watched := newWatchedListener(s.control, s.endIfUnused)
	// Calls that are under way are answered, so they do not end with ctx.
	go func() { failed <- server.Serve(context.WithoutCancel(ctx), watched) }()
	select {
	case err := <-failed:
		return fmt.Errorf("serve: %w", err)
	case <-ctx.Done():
	}
	_ = s.streams.Close()
	time.Sleep(answerGrace)
	grace, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = server.Shutdown(grace)
	return server.Close()
}

// gate keeps what changes a container from beginning while an upgrade is under
// way. Calls that only look, or wait for long, are let through.
func (s *Supervisor) gate(ctx context.Context, unmarshal ttrpc.Unmarshaler, info *ttrpc.UnaryServerInfo, method ttrpc.Method) (any, error) {
	switch _, name, _ := strings.Cut(strings.TrimPrefix(info.FullMethod, "/"), "/"); name {
	case "Info", "List", "ExecWait", "Upgrade":
		return method(ctx, unmarshal)
	}
	s.changes.RLock()
	defer s.changes.RUnlock()
	return method(ctx, unmarshal)
}

// endIfUnused ends a supervisor that has no containers, when the last client
// has gone, and reports whether it did: with no daemon and no pods, nothing
// stays. A daemon that comes starts another one.
func (s *Supervisor) endIfUnused() bool {
	if len(s.all()) > 0 {
		return false
	}
	s.stop()
	return true
}

// listen replaces a stale socket: the caller holds the directory's lock.
func listen(path string) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	return socket.ListenPrivate(path)
}
