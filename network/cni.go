package network

import (
	"context"
	"log/slog"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/namespace"
)

// Options say where the network lives and how long things may take.
type Options struct {
	// ConfDir is the CNI configuration directory, BinDirs where plugins are
	// looked for, in that order.
	ConfDir string
	BinDirs []string
	// Root is the durable directory of this package: the journal and the pod
	// CIDR of the default network.
	Root string
	// Mark is in the environment of every plugin, as NAME=VALUE, and tells the
	// plugins of this daemon from those of others. The caller puts it into the
	// environment of the process.
	Mark string
	// Namespaces are the pinned network namespaces of the attachments.
	Namespaces *namespace.Dir
	// Default is the embedded network for a machine that has none.
	Default DefaultNetwork
	Limits  Limits
	Logger  *slog.Logger
}

// Limits bound what waits for plugins.
type Limits struct {
	// Add, Del, Check, Status and GC are the longest that one run of the verb,
	// over all plugins of a chain, may take.
	Add, Del, Check, Status, GC time.Duration
	// DetachTries and DetachTime end the blocking of a pod's deletion by a DEL
	// that fails: after so many tries, or so long after the first.
	DetachTries int
	DetachTime  time.Duration
	// RetryFirst and RetryMost are the first and the longest pause between
	// the background tries of a DEL; the pause doubles.
	RetryFirst, RetryMost time.Duration
	// Reload and StatusPeriod are how often the configuration directory is
	// looked at, and how often the plugins are asked for their STATUS.
	Reload, StatusPeriod time.Duration
	// GCPeriod and CheckPeriod are how often CNI GC, and CHECK of all
	// attachments, run; 0 turns them off.
	GCPeriod, CheckPeriod time.Duration
}

// CNI are the networks of this node.
type CNI struct {
	options Options
	plugins *plugins
	journal *state.Records[Attachment]
	// current is what was read last from the configuration directory.
	current atomic.Pointer[snapshot]
	status  atomic.Pointer[status]
	changed chan struct{}

	// mu guards the two fields below, and nothing is run or written under it.
	mu          sync.Mutex
	attachments map[string]*attachment
	podCIDR     string

	// leftovers are set by Open and awaited by Run.
	leftovers []leftover

	gate     gate
	retry    chan struct{}
	checkNow chan struct{}
}

// Open reads the journal and the configuration directory. Run has to be
// called to follow changes and to retry. Where plugins of an earlier daemon
// still run, nothing new does before they have ended.
func Open(ctx context.Context, options Options) (*CNI, error) {
	n := &CNI{
		options:     options,
		plugins:     &plugins{directories: options.BinDirs, mark: options.Mark},
		attachments: make(map[string]*attachment),
		changed:     make(chan struct{}, 1),
		retry:       make(chan struct{}, 1),
		checkNow:    make(chan struct{}, 1),
	}
	if err := n.openJournal(); err != nil {
		return nil, err
	}
	var err error
	if n.leftovers, err = n.findLeftovers(ctx); err != nil {
		return nil, err
	}
	if err := n.loadPodCIDR(); err != nil {
		return nil, err
	}
	n.Reload()
	n.refreshStatus(ctx, min(options.Limits.Status, firstStatus))
	return n, nil
}

// Run follows the configuration directory, the STATUS of the plugins and the
// attachments that wait for their DEL or for plugins of an earlier daemon, and
// collects garbage, until the context ends.
func (n *CNI) Run(ctx context.Context) {
	var wait sync.WaitGroup
	wait.Go(func() { n.awaitLeftovers(ctx) })
	wait.Go(func() { n.watch(ctx) })
	wait.Go(func() { n.followStatus(ctx) })
	wait.Go(func() { n.retryDetach(ctx) })
	wait.Go(func() { n.collectPeriodically(ctx) })
	wait.Go(func() { n.checkPeriodically(ctx) })
	wait.Wait()
}

func (n *CNI) journalDir() string { return filepath.Join(n.options.Root, "attachments") }
