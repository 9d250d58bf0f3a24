package network

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/namespace"
	"github.com/minicri/minicri/network/runner"
)

// Options say where the network lives and how long things may take.
type Options struct {
	// ConfDir is the node's CNI configuration directory, BinDirs where plugins
	// are looked for, in that order.
	ConfDir string
	BinDirs []string
	// Root is the durable directory of this package: the journal, and the pod CIDR
	// of the default network.
	Root string
	// CgroupParent is the cgroup, below each hierarchy, that those of plugin runs are made
	// in; "" is the one of this process. Mark begins their names.
	CgroupParent, Mark string
	// Namespaces are the pinned network namespaces of the attachments.
	Namespaces *namespace.Dir
	// Default is the embedded network for a machine that has none.
	Default DefaultNetwork
	Limits  Limits
	// Observe measures each run of a plugin that has ended, Later is told what becomes of
	// an attachment when its sandbox may be gone. Both may be nil.
	Observe func(plugin, verb string, took time.Duration, ok bool)
	Later   func(id string, row step.Row)
	Logger  *slog.Logger
}

// Limits bound what waits for plugins. They are keys of the configuration, and explained
// there.
type Limits struct {
	// A run of a verb, over all plugins of a chain, may take so long.
	Add, Del, Check, Status, GC time.Duration
	// A DEL that fails blocks its pod's deletion until Detach has failed so often, or so
	// long after the first failure.
	DetachTries int
	DetachTime  time.Duration
	// The undoing of an attachment whose ADD never succeeded ends when its DEL has failed so
	// often, or for so long.
	GiveUpTries int
	GiveUpTime  time.Duration
	// The pause between the background tries of one attachment's DEL doubles.
	RetryFirst, RetryMost time.Duration
	// Periods; 0 turns the last two off.
	Reload, StatusPeriod, GCPeriod, CheckPeriod time.Duration
}

// CNI are the networks of this node.
type CNI struct {
	// Directory is the node's own configuration directory.
	*Directory
	options Options
	// limits and network (the embedded one) are those in force.
	limits     atomic.Pointer[Limits]
	network    atomic.Pointer[DefaultNetwork]
	masquerade masquerade
	runner     *runner.Runner
	journal    *state.Records[Attachment]
	bootID     string
	// slots are for the DELs of the background.
	slots    *semaphore.Weighted
	checkNow chan struct{}

	// mu guards the fields below and what attachment and linger say; no plugin runs and
	// nothing is written under it.
	mu          sync.Mutex
	attachments map[string]*attachment
	podCIDR     string
	gates       map[string]*semaphore.Weighted // by network
	lingering   map[*linger]bool
	byPath      map[string]*Directory

	// base is the context of what runs in the background, which begins with Run: begun is
	// closed then. Close ends it, and waits for that.
	base       context.Context
	end        context.CancelFunc
	begun      chan struct{}
	background sync.WaitGroup
}

// Open reads the journal and the configuration directory, and finds the plugin
// runs of an earlier daemon, which are waited for in the background. Run has to be called
// to follow changes and to retry; Close has to be called at the end.
func Open(ctx context.Context, options Options) (*CNI, error) {
	n := &CNI{
		options:     options,
		masquerade:  masquerade{table: options.Mark + "masquerade", logger: options.Logger},
		slots:       semaphore.NewWeighted(atOnce),
		checkNow:    make(chan struct{}, 1),
		attachments: make(map[string]*attachment),
		gates:       make(map[string]*semaphore.Weighted),
		lingering:   make(map[*linger]bool),
		byPath:      make(map[string]*Directory),
		begun:       make(chan struct{}),
	}
	n.masquerade.attachments = n.masqueraded
	n.base, n.end = context.WithCancel(context.WithoutCancel(ctx))
	n.SetLimits(options.Limits)
	n.network.Store(&options.Default)
	var err error
	if n.bootID, err = process.BootID(); err != nil {
		return nil, err
	}
	parent, err := cgroup.GroupParent(options.CgroupParent)
	if err != nil {
		return nil, fmt.Errorf("find a place for the plugins: %w", err)
	}
	if n.runner, err = runner.Open(parent, options.Mark); err != nil {
		return nil, err
	}
	if err := n.loadPodCIDR(); err != nil {
		return nil, err
	}
	// The journal first: the embedded network asks it whose its bridge is.
	if err := n.openJournal(); err != nil {
		return nil, err
	}
	n.Directory = n.In("")
	n.Reload()
	n.findLeftRuns()
	for _, follow := range []func(){n.watch, n.collectPeriodically, n.checkPeriodically, n.followMasquerade} {
		n.inBackground(follow)
	}
	return n, nil
}

// SetDefault puts another embedded network into force, for pods that are made
// from now on.
func (n *CNI) SetDefault(network DefaultNetwork) {
	if before := n.network.Swap(&network); *before != network {
		n.readAgain.Store(true)
	}
}

// Run follows the configuration directories, the STATUS of the plugins and the
// attachments that wait for their DEL or for plugins of an earlier daemon, and
// collects garbage, until the context ends, or with Leave or Close. It is called once.
func (n *CNI) Run(ctx context.Context) {
	defer context.AfterFunc(ctx, n.end)()
	close(n.begun)
	<-n.base.Done()
	n.background.Wait()
}

// inBackground calls do when Run has begun. It does nothing once the daemon ends.
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

// Leave has the plugins that run, and those that are begun from now on, continue
// under the next daemon when they take long; their callers get an error soon. The
// result of an ADD is waited for.
func (n *CNI) Leave() { n.end() }

// Close leaves the plugins that run to the next daemon, which waits for them. An ADD
// is not left: its caller ends with the daemon, and undoes it.
func (n *CNI) Close() {
	n.end()
	n.background.Wait()
}

func (n *CNI) journalDir() string { return filepath.Join(n.options.Root, "attachments") }

// SetLimits puts other limits into force, for runs that begin from now on and for all periods.
func (n *CNI) SetLimits(limits Limits) { n.limits.Store(&limits) }

// awaitPeriod waits for the period that is in force, which may change while it waits;
// a period of 0 does not end. It returns early at wake, and when the daemon ends.
func (n *CNI) awaitPeriod(wake <-chan struct{}, period func(Limits) time.Duration) {
	for began := time.Now(); n.base.Err() == nil; {
		look := time.Second
		if p := period(*n.limits.Load()); p > 0 {
			if look = min(look, p-time.Since(began)); look <= 0 {
				return
			}
		}
		select {
		case <-n.base.Done():
		case <-wake:
			return
		case <-time.After(look):
		}
	}
}
