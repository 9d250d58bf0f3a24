package network

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	gocni "github.com/containerd/go-cni"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/state"
)

// ErrNoConfiguration means that the configuration directory has no valid file.
var ErrNoConfiguration = errors.New("no CNI configuration")

// Directory is a CNI configuration directory, the node's or a runtime handler's. Its first valid
// configuration by name is the network of new pods; the journal has that of existing ones.
type Directory struct {
	owner *CNI
	path  string
	// ctx ends with the daemon, or when no handler has the directory any more.
	ctx context.Context
	end context.CancelFunc
	// reading is held by reload, so that its caller gets the present state, not that of a read under way. Only latest
	// waits for it, and the goroutine that polls.
	reading sync.Mutex
	// readAgain makes the next reload read an unchanged directory.
	readAgain atomic.Bool
	current   atomic.Pointer[snapshot]
	status    atomic.Pointer[status]
	// asked is closed when the plugins have first answered STATUS.
	asked, changed chan struct{}
}

// snapshot is the immutable result of one read of the directory.
type snapshot struct {
	// configuration is for the next pod, nil if there is none; good are all valid ones.
	configuration *Configuration
	good          []*Configuration
	problems      []error
	signature     string
}

// status is the last answer to STATUS: err is nil for ready. slow means that a later question had no answer in time, or
// that the plugins cannot run since the time unfit.
type status struct {
	err   error
	slow  bool
	unfit time.Time
}

// In returns the configuration directory at a path, "" for the node's, and follows it from then on.
func (n *CNI) In(path string) *Directory {
	n.mu.Lock()
	defer n.mu.Unlock()
	path = cmp.Or(path, n.options.ConfDir)
	d := n.byPath[path]
	if d == nil {
		d = &Directory{owner: n, path: path, asked: make(chan struct{}), changed: make(chan struct{}, 1)}
		d.ctx, d.end = context.WithCancel(n.base)
		d.current.Store(&snapshot{})
		n.byPath[path] = d
		n.inBackground(d.followStatus)
	}
	return d
}

// Keep stops following the directories that are neither the node's nor among these.
func (n *CNI) Keep(paths []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for path, d := range n.byPath {
		if d != n.Directory && !slices.Contains(paths, path) {
			d.end()
			delete(n.byPath, path)
		}
	}
}

// directories returns all directories, the node's last.
func (n *CNI) directories() (all []*Directory) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, d := range n.byPath {
		if d != n.Directory {
			all = append(all, d)
		}
	}
	return append(all, n.Directory)
}

// watch polls the configuration directories, which takes microseconds. Renamed files, switched symlinks,
// directories made anew and network file systems would each need care of their own with inotify(7).
func (n *CNI) watch() {
	for n.base.Err() == nil {
		n.Reload()
		n.awaitPeriod(n.base, nil, func(l Limits) time.Duration { return l.Reload })
	}
}

// Reload reads the configuration directories that have changed.
func (n *CNI) Reload() {
	for _, d := range n.directories() {
		d.reload()
	}
}

func (d *Directory) reload() {
	d.reading.Lock()
	defer d.reading.Unlock()
	sum := sha256.New()
	fmt.Fprintln(sum, d.owner.PodCIDR())
	describe(sum, d.path, true)
	if d == d.owner.Directory && d.owner.network.Load().Enabled {
		d.owner.describePlugins(sum)
	}
	signature, last := string(sum.Sum(nil)), d.current.Load()
	if !d.readAgain.Swap(false) && last.signature == signature {
		return
	}
	next := &snapshot{signature: signature}
	next.good, next.problems = readDirectory(d.path, last.good)
	if len(next.good) > 0 {
		next.configuration = next.good[0]
	}
	if d == d.owner.Directory {
		d.owner.standIn(next)
	}
	d.current.Store(next)
	d.report(last, next)
	before, now := last.configuration, next.configuration
	if before != nil && now != nil && !bytes.Equal(before.Bytes, now.Bytes) {
		d.owner.hurryAll() // what no DEL could undo may be corrected
	}
}

// report logs what is new in a snapshot.
func (d *Directory) report(last, next *snapshot) {
	logger := d.owner.options.Logger
	said := texts(last.problems)
	for _, problem := range next.problems {
		if !slices.Contains(said, problem.Error()) {
			logger.Warn("network configuration skipped", "err", problem)
		}
	}
	before, now := last.configuration, next.configuration
	switch {
	case now == nil && (before != nil || last.signature == ""):
		logger.Info("no network configuration", "dir", d.path)
	case now != nil && (before == nil || before.File != now.File || !bytes.Equal(before.Bytes, now.Bytes)):
		logger.Info("network configuration loaded", "network", now.Name, "file", now.source())
	case slices.Equal(said, texts(next.problems)):
		return
	}
	notify(d.changed)
}

func texts(errs []error) (texts []string) {
	for _, err := range errs {
		texts = append(texts, err.Error())
	}
	return texts
}

// standIn uses the embedded network if the directory has none.
func (n *CNI) standIn(next *snapshot) {
	network := n.network.Load()
	if next.configuration != nil || !network.Enabled {
		n.masquerade.use(nil)
		n.forward.use(nil)
		return
	}
	written := cmp.Or(network.Subnet, n.PodCIDR())
	subnets, err := config.ParseSubnets(written)
	if written == "" {
		err = errors.New("the default network has no subnet: set default_network.subnet, or let the kubelet send the pod CIDR")
	}
	if err == nil {
		if err = n.freeBridge(network, subnets); err != nil {
			n.readAgain.Store(true) // until the pods are gone
		}
	}
	if err == nil {
		var masqueraded []netip.Prefix
		if network.Masquerade {
			masqueraded = subnets
		}
		if err := keepRouterRoutes(n.options.Logger, subnets); err != nil {
			next.problems = append(next.problems, err)
		}
		n.forward.use(subnets)
		inForce, again := n.masquerade.use(masqueraded)
		next.configuration, err = network.configuration(subnets, inForce, network.choose(&n.programs, n.options.BinDirs))
		if again {
			n.readAgain.Store(true)
		}
	}
	if err != nil {
		next.problems = append(next.problems, err)
	}
}

// describe writes all that configurations are read from, with symlinks followed. It reads the files: one that an
// installer has written over the other may have its size, times and inode. Folders are looked into once: a list may
// take its plugins from one.
func describe(w io.Writer, directory string, descend bool) {
	entries, err := os.ReadDir(directory)
	if err != nil {
		fmt.Fprintln(w, err)
	}
	for _, entry := range entries {
		path := filepath.Join(directory, entry.Name())
		info, err := os.Stat(path)
		switch {
		case err != nil:
			fmt.Fprintln(w, err)
		case info.IsDir() && descend:
			describe(w, path, false)
		case info.IsDir() || !slices.Contains(endings, filepath.Ext(path)):
		case info.Size() > largestFile:
			fmt.Fprintln(w, path, identity(info))
		default:
			data, err := state.ReadFile(path)
			fmt.Fprintf(w, "%q %q %v\n", path, data, err)
		}
	}
}

// largestFile is more than any configuration has. A larger file is not read each second.
const largestFile = 1 << 20

// Configuration returns the network of the next pod. If there is none, it reads the directory for latestLimit at most.
func (d *Directory) Configuration() (*Configuration, error) { return d.configuration(d.ctx) }

func (d *Directory) configuration(ctx context.Context) (*Configuration, error) {
	if found, err := d.read(); err == nil {
		return found, nil
	}
	return d.latest(ctx)
}

// read returns the last configuration, or an error that explains why there is none.
func (d *Directory) read() (*Configuration, error) {
	s := d.current.Load()
	if s.configuration != nil {
		return s.configuration, nil
	}
	text := texts(s.problems)
	if len(text) == 0 {
		text = []string{"put a .conflist there"}
		if d == d.owner.Directory {
			text[0] += ", or set default_network.enabled"
		}
	}
	return nil, fmt.Errorf("%w in %s: %s", ErrNoConfiguration, d.path, strings.Join(text, "; "))
}

// Problems returns, for each invalid file of the directory, why it is invalid.
func (d *Directory) Problems() []error { return d.current.Load().problems }

// Remark returns what a person has to know of the files while another configuration is in use, "" if nothing.
func (d *Directory) Remark() string {
	s := d.current.Load()
	if s.configuration == nil {
		return ""
	}
	problems := strings.Join(texts(s.problems), "; ")
	if s.configuration.File == "" && problems == "" {
		problems = d.owner.forward.blocked()
	}
	if problems == "" {
		return ""
	}
	return fmt.Sprintf("network %q of %s is in use, but: %s", s.configuration.Name, s.configuration.source(), problems)
}

// remarked adds the remark to an error: who has just edited a file takes the error for one of the new content.
func (d *Directory) remarked(err error) error {
	if remark := d.Remark(); err != nil && remark != "" {
		return fmt.Errorf("%w (%s)", err, remark)
	}
	return err
}

// latest reads the directory for a pod, so that it gets each change made before its call. A disk that hangs delays it
// by latestLimit.
func (d *Directory) latest(ctx context.Context) (*Configuration, error) {
	read := make(chan struct{})
	go func() {
		defer close(read)
		d.reload()
	}()
	select {
	case <-read:
	case <-ctx.Done():
	case <-time.After(latestLimit):
	}
	return d.read()
}

// Ready returns why no pod can be attached now, or nil. It waits only for the first answer after the start.
func (d *Directory) Ready(ctx context.Context) error {
	if _, err := d.configuration(ctx); err != nil {
		return err
	}
	if d.status.Load() == nil {
		select {
		case <-d.asked:
		case <-ctx.Done():
			return fmt.Errorf("the network plugins have not answered STATUS yet: %w", context.Cause(ctx))
		}
	}
	return d.remarked(d.status.Load().err)
}

// followStatus polls STATUS, more often while not ready or slow: a node is ready soon after its network.
func (d *Directory) followStatus() {
	for d.ctx.Err() == nil {
		d.refreshStatus()
		s := d.status.Load()
		unsure := s != nil && (s.err != nil || s.slow)
		d.owner.awaitPeriod(d.ctx, d.changed, func(l Limits) time.Duration {
			if unsure {
				return min(l.StatusPeriod, notReadyPeriod)
			}
			return l.StatusPeriod
		})
	}
}

// refreshStatus asks the plugins. Those before CNI 1.1 have no STATUS, so we check that the programs exist.
func (d *Directory) refreshStatus() {
	n := d.owner
	configuration, err := d.Configuration()
	var unfit error
	if err == nil {
		unfit = errors.Join(n.programs.unfit(configuration, n.options.BinDirs, false)...)
		err = unfit
	}
	switch {
	case err != nil:
	case n.isStuck("STATUS", configuration.Name):
		err = fmt.Errorf("CNI STATUS: %w", errStuck)
	default:
		asked := Attachment{Network: configuration.Name, Config: configuration.Bytes}
		err = n.call(context.Background(), nil, asked, "STATUS", n.limits.Load().Status, func(_ context.Context, cni gocni.CNI) error {
			return cni.Status()
		})
	}
	if d.ctx.Err() != nil {
		return // the daemon ends, which says nothing of the network, or no handler has it
	}
	last := d.status.Load()
	if last != nil && last.err == nil && d.excused(err, unfit, last) {
		return
	}
	d.status.Store(&status{err: err})
	if last == nil {
		close(d.asked)
	}
	if last == nil || (last.err == nil) != (err == nil) {
		pairs := []any{"dir", d.path, "ready", err == nil}
		if err != nil {
			pairs = append(pairs, "err", err)
		}
		n.options.Logger.Info("network readiness changed", pairs...)
	}
	if err == nil && last != nil && last.err != nil {
		n.hurryAll()
	}
}

// excused reports whether a network that was ready stays so after a failure that most likely ends soon: a single slow
// answer, which rather shows a busy machine, or a plugin that is being replaced in place. A node that is not ready
// takes its pods out of all services.
func (d *Directory) excused(err, unfit error, last *status) bool {
	logger := d.owner.options.Logger
	_, version := errors.AsType[*versionError](unfit)
	switch {
	case errors.Is(err, errLate) && !last.slow:
		logger.Warn("the network plugins are slow to answer STATUS: they are asked again", "err", err)
		d.status.Store(&status{slow: true})
	case unfit == nil || version || !last.unfit.IsZero() && time.Since(last.unfit) >= installLimit:
		return false
	case last.unfit.IsZero():
		logger.Warn("the network plugins cannot run: an installer may be replacing them", "err", err)
		d.status.Store(&status{slow: true, unfit: time.Now()})
	}
	return true
}
