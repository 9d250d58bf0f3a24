package network

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"math"
	"net/netip"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/network/runner"
)

// Options say which directories, programs and limits the network uses.
type Options struct {
	// ConfDir is the node's CNI configuration directory. Plugins are searched in BinDirs, in order.
	ConfDir string
	BinDirs []string
	// Root is the durable directory of the journal, whose entries name Version, and of the default network's pod CIDR.
	Root, Version string
	// CgroupParent is where the runs' cgroups are, "" for this process's cgroup. Their names begin with Mark.
	CgroupParent, Mark string
	// Runs begins the plugin runs; nil stands for a runner.Runner below CgroupParent.
	Runs Runs
	// CacheDir is where libcni keeps the answers to ADD; "" stands for the directory of all runtimes, libcni.CacheDir.
	CacheDir   string
	Namespaces Namespaces
	// WithoutRules leaves the rules of the firewall alone, for tests without a kernel.
	WithoutRules bool
	Default      DefaultNetwork
	Limits       Limits
	// Observe gets each plugin run, Later what becomes of attachments without a sandbox. Both may be nil.
	Observe func(plugin, verb string, took time.Duration, ok bool)
	Later   func(id string, row step.Row)
	Logger  *slog.Logger
}

// Runs are the runs of plugins. runner.Runner implements it.
type Runs interface {
	Begin(request runner.Request) (*runner.Run, error)
	Left() ([]*runner.Run, error)
}

// Namespaces are the network namespaces of pods, by id. namespace.Dir implements it.
type Namespaces interface {
	Alive(id string) bool
	Path(id string) string
	Remove(id string) error
}

// Limits bound runs, by verb, and what waits for them. The configuration's keys explain them.
type Limits struct {
	Add, Del, Check, Status, GC time.Duration
	// AtOnce is how many chains of plugins run at once for ADD and DEL, 0 for no limit.
	AtOnce int
	// A failing DEL blocks its pod's deletion for DetachTries calls of Detach and for DetachTime at most.
	DetachTries int
	DetachTime  time.Duration
	// We give up an attachment whose ADD never succeeded after GiveUpTries failed DELs and GiveUpTime.
	GiveUpTries int
	GiveUpTime  time.Duration
	// The pause between an attachment's background DELs doubles from RetryFirst up to RetryMost.
	RetryFirst, RetryMost time.Duration
	// Periods; 0 turns the last two off.
	Reload, StatusPeriod, GCPeriod, CheckPeriod time.Duration
}

// How long something is waited for, and how often a wait looks again, beside Limits and process.KillLimit.
const (
	leaveLimit     = process.KillLimit / 6  // for a run when the daemon ends; then it is killed or left to the next one
	gcWait         = 5 * time.Second        // of ADD, DEL and CHECK for GC, which is ended then
	nftLimit       = 5 * time.Second        // for one run of nft
	versionLimit   = 5 * time.Second        // for one VERSION of a plugin
	turnLimit      = 2 * time.Second        // for the turn of a chain of plugins, which then waits and does not compute
	latestLimit    = time.Second            // for a pod's look at the configuration directory
	installLimit   = 10 * time.Second       // for an installer that replaces plugins in place
	notReadyPeriod = time.Second            // of STATUS while the network is not ready or is slow
	rulesPause     = 300 * time.Millisecond // between two reports of changed rules
	outagePause    = time.Minute            // between two lines of the log about failed DELs of a network
	givenUpPoll    = 2 * time.Second        // whether they have, or a person gives the attachment up
)

// limits are Limits in force. changed is closed when others replace them. A chain of plugins takes one of turns.
type limits struct {
	Limits
	changed chan struct{}
	turns   *semaphore.Weighted
}

// CNI manages the networks of this node.
type CNI struct {
	*Directory
	options    Options
	limits     atomic.Pointer[limits]
	network    atomic.Pointer[DefaultNetwork]
	masquerade masquerade
	forward    forward
	programs   programs
	runs       Runs
	journal    *state.Records[Attachment]
	bootID     string
	unread     []string // ids of entries that cannot be read or are lost, which GC spares
	slots      *semaphore.Weighted
	checkNow   chan struct{}
	// mu guards the fields below, attachments' records and drifts, and linger.stuck.
	mu          sync.Mutex
	attachments map[string]*attachment
	podCIDR     string
	gates       map[string]*gate // by network
	outages     map[string]*outage
	failures    map[Failed]int
	lingering   map[*linger]bool
	byPath      map[string]*Directory
	// base is the context of the background, which begins when Run closes begun. Close ends base and waits.
	base       context.Context
	end        context.CancelFunc
	begun      chan struct{}
	background sync.WaitGroup
}

// Open reads the journal and the configuration directory and finds the plugin runs of an earlier daemon. The
// caller has to call Run, which follows changes, waits for these runs and retries DELs, and Close at the end.
func Open(ctx context.Context, options Options) (*CNI, error) {
	n := &CNI{
		options:     options,
		masquerade:  masquerade{table: options.Mark + "masquerade", logger: options.Logger},
		forward:     forward{mark: options.Mark + "forward", logger: options.Logger},
		slots:       semaphore.NewWeighted(atOnce),
		checkNow:    make(chan struct{}, 1),
		attachments: make(map[string]*attachment),
		gates:       make(map[string]*gate),
		outages:     make(map[string]*outage),
		failures:    make(map[Failed]int),
		lingering:   make(map[*linger]bool),
		byPath:      make(map[string]*Directory),
		begun:       make(chan struct{}),
	}
	n.masquerade.attachments = func() []netip.Prefix { return n.subnetsUnder(masqueradeKey) }
	n.forward.attachments = func() []netip.Prefix { return n.subnetsUnder(forwardKey) }
	n.base, n.end = context.WithCancel(context.WithoutCancel(ctx))
	n.SetLimits(options.Limits)
	n.network.Store(&options.Default)
	var err error
	if n.bootID, err = process.BootID(); err != nil {
		return nil, err
	}
	if n.runs, err = openRuns(options); err != nil {
		return nil, err
	}
	if err := n.loadPodCIDR(); err != nil {
		return nil, err
	}
	// The journal goes first: the embedded network asks it for the pods on its bridge.
	if err := n.openJournal(); err != nil {
		return nil, err
	}
	n.Directory = n.In("")
	n.Reload()
	n.findLeftRuns()
	for _, follow := range []func(){n.watch, n.collectPeriodically, n.checkPeriodically} {
		n.inBackground(follow)
	}
	if !options.WithoutRules {
		n.inBackground(n.followMasquerade)
	}
	return n, nil
}

func openRuns(options Options) (Runs, error) {
	if options.Runs != nil {
		return options.Runs, nil
	}
	parent, err := cgroup.GroupParent(options.CgroupParent)
	if err != nil {
		return nil, fmt.Errorf("find a place for the plugins: %w", err)
	}
	return runner.Open(parent, options.Mark)
}

// SetDefault replaces the embedded network for new pods.
func (n *CNI) SetDefault(network DefaultNetwork) {
	if before := n.network.Swap(&network); *before != network {
		n.readAgain.Store(true)
	}
}

// Run does the background work until the context ends, or until Leave or Close. It is called once. It follows
// directories and STATUS, repeats DELs, waits for earlier runs and collects garbage.
func (n *CNI) Run(ctx context.Context) {
	defer context.AfterFunc(ctx, n.end)()
	close(n.begun)
	<-n.base.Done()
	n.background.Wait()
}

// inBackground calls do once Run has begun, unless the daemon ends first.
func (n *CNI) inBackground(do func()) {
	if n.base.Err() != nil {
		return
	}
	n.background.Go(func() {
		select {
		case <-n.base.Done():
		case <-n.begun:
			do()
		}
	})
}

// Leave lets slow plugins continue under the next daemon; their callers soon get an error. It waits for ADDs.
func (n *CNI) Leave() { n.end() }

// Close leaves running plugins to the next daemon, but no ADD: its caller ends with the daemon and undoes it.
func (n *CNI) Close() {
	n.end()
	n.background.Wait()
}

func (n *CNI) journalDir() string { return filepath.Join(n.options.Root, "attachments") }

// SetLimits replaces the limits for new runs and for all periods.
func (n *CNI) SetLimits(next Limits) {
	turns := semaphore.NewWeighted(int64(cmp.Or(next.AtOnce, math.MaxInt32)))
	if last := n.limits.Swap(&limits{next, make(chan struct{}), turns}); last != nil {
		close(last.changed)
	}
}

// awaitPeriod waits for a period, endless if 0, for wake, or for the end of ctx. The period may change meanwhile.
func (n *CNI) awaitPeriod(ctx context.Context, wake <-chan struct{}, period func(Limits) time.Duration) {
	for began := time.Now(); ctx.Err() == nil; {
		limits := n.limits.Load()
		var due <-chan time.Time
		if p := period(limits.Limits); p > 0 {
			due = time.After(p - time.Since(began))
		}
		select {
		case <-ctx.Done():
			return
		case <-wake:
			return
		case <-due:
			return
		case <-limits.changed:
		}
	}
}
