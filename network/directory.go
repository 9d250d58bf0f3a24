package network

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	gocni "github.com/containerd/go-cni"
)

// ErrNoConfiguration says that no file of the configuration directory can be used.
var ErrNoConfiguration = errors.New("no CNI configuration")

// Directory is a CNI configuration directory: that of the node, or one that a
// runtime handler has for itself. Its first valid configuration by name is the
// network of the pods that are made from now on; those that are there keep
// theirs, which is in the journal.
type Directory struct {
	owner *CNI
	path  string
	// readAgain has the next reload read what has not changed on the disk.
	readAgain atomic.Bool
	// current is what was read last.
	current atomic.Pointer[snapshot]
	status  atomic.Pointer[status]
	// asked is closed when the plugins have answered STATUS for the first time.
	asked   chan struct{}
	changed chan struct{}
}

// snapshot is one look at the configuration directory. It is immutable.
type snapshot struct {
	// configuration is what the next pod gets, nil if there is none; good are
	// all that could be used.
	configuration *Configuration
	good          []*Configuration
	problems      []error
	signature     string
}

// status is the last answer to whether pods can be attached; nil error is yes. slow is set
// when the plugins did not answer in time since then.
type status struct {
	err  error
	slow bool
}

// In is the configuration directory at a path, which is followed from the first time that
// it is asked for; "" is the node's own.
func (n *CNI) In(path string) *Directory {
	n.mu.Lock()
	defer n.mu.Unlock()
	path = cmp.Or(path, n.options.ConfDir)
	d := n.byPath[path]
	if d == nil {
		d = &Directory{owner: n, path: path, asked: make(chan struct{}), changed: make(chan struct{}, 1)}
		d.current.Store(&snapshot{})
		n.byPath[path] = d
		n.inBackground(d.followStatus)
	}
	return d
}

// directories are all of them, the node's own last.
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

// watch looks at the configuration directories again and again. Looking costs
// some microseconds; in return there is one mechanism for a file renamed in, a
// symlink switched, a directory removed and made again, and a network file
// system, each of which needs its own care with inotify(7).
func (n *CNI) watch() {
	for n.base.Err() == nil {
		n.Reload()
		n.awaitPeriod(nil, func(l Limits) time.Duration { return l.Reload })
	}
}

// Reload reads the configuration directories in which anything has changed.
func (n *CNI) Reload() {
	for _, d := range n.directories() {
		d.reload()
	}
}

// reload reads the directory if anything in it has changed.
func (d *Directory) reload() {
	signature, last := d.signature(), d.current.Load()
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
	if last.signature != signature || (next.configuration == nil) != (last.configuration == nil) || fmt.Sprint(next.problems) != fmt.Sprint(last.problems) {
		d.log(next)
	}
	if last.configuration != nil && next.configuration != nil && !bytes.Equal(last.configuration.Bytes, next.configuration.Bytes) {
		d.owner.hurryAll() // what no DEL could undo may be corrected
	}
	select {
	case d.changed <- struct{}{}:
	default:
	}
}

// standIn has the embedded network stand in for one that is not there.
func (n *CNI) standIn(next *snapshot) {
	network := n.network.Load()
	if next.configuration != nil || !network.Enabled {
		n.masquerade.use(nil)
		return
	}
	subnets, err := network.subnets(n.PodCIDR())
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
		inForce, again := n.masquerade.use(masqueraded)
		next.configuration, err = network.configuration(subnets, inForce)
		if again {
			n.readAgain.Store(true)
		}
	}
	if err != nil {
		next.problems = append(next.problems, err)
	}
}

func (d *Directory) log(s *snapshot) {
	logger := d.owner.options.Logger
	for _, problem := range s.problems {
		logger.Warn("network configuration skipped", "err", problem)
	}
	if s.configuration == nil {
		logger.Info("no network configuration", "dir", d.path)
		return
	}
	logger.Info("network configuration loaded", "network", s.configuration.Name, "file", s.configuration.File)
}

// signature changes whenever a file that the configuration may be read from
// does: names, sizes, times and inodes, with symlinks followed. Folders are
// looked into once, because a list may take its plugins from one.
func (d *Directory) signature() string {
	var b strings.Builder
	fmt.Fprintln(&b, d.owner.PodCIDR())
	describe(&b, d.path, true)
	return b.String()
}

func describe(b *strings.Builder, directory string, descend bool) {
	entries, err := os.ReadDir(directory)
	if err != nil {
		fmt.Fprintln(b, err)
	}
	for _, entry := range entries {
		path := filepath.Join(directory, entry.Name())
		info, err := os.Stat(path)
		if err != nil {
			fmt.Fprintln(b, err)
			continue
		}
		fmt.Fprintln(b, path, info.Size(), info.ModTime().UnixNano(), info.Sys().(*syscall.Stat_t).Ino)
		if info.IsDir() && descend {
			describe(b, path, false)
		}
	}
}

// Configuration is what the next pod gets, or an error that says why there is
// none.
func (d *Directory) Configuration() (*Configuration, error) {
	if s := d.current.Load(); s.configuration != nil {
		return s.configuration, nil
	}
	d.reload()
	s := d.current.Load()
	if s.configuration != nil {
		return s.configuration, nil
	}
	var text []string
	for _, problem := range s.problems {
		text = append(text, problem.Error())
	}
	if len(text) == 0 {
		text = []string{"put a .conflist there"}
		if d == d.owner.Directory {
			text[0] += ", or set default_network.enabled"
		}
	}
	return nil, fmt.Errorf("%w in %s: %s", ErrNoConfiguration, d.path, strings.Join(text, "; "))
}

// Problems are the files of the directory that cannot be used, each with its
// reason.
func (d *Directory) Problems() []error { return d.current.Load().problems }

// Ready returns why no pod can be attached now, or nil. It answers from memory
// and waits for the first answer after the start only, which takes as long as
// STATUS may.
func (d *Directory) Ready(ctx context.Context) error {
	if _, err := d.Configuration(); err != nil {
		return err
	}
	if d.status.Load() == nil {
		select {
		case <-d.asked:
		case <-ctx.Done():
			return fmt.Errorf("the network plugins have not answered STATUS yet: %w", context.Cause(ctx))
		}
	}
	return d.status.Load().err
}

// followStatus asks the plugins again and again: more often while they are not ready or did
// not answer, so that a node becomes ready soon after its network does.
func (d *Directory) followStatus() {
	const notReadyPeriod = time.Second
	for d.owner.base.Err() == nil {
		d.refreshStatus()
		s := d.status.Load()
		unsure := s != nil && (s.err != nil || s.slow)
		d.owner.awaitPeriod(d.changed, func(l Limits) time.Duration {
			if unsure {
				return min(l.StatusPeriod, notReadyPeriod)
			}
			return l.StatusPeriod
		})
	}
}

// refreshStatus asks the plugins of the configuration of now. Plugins before
// CNI 1.1 have no STATUS; that their programs are there is all one can ask.
func (d *Directory) refreshStatus() {
	n := d.owner
	configuration, err := d.Configuration()
	if err == nil {
		err = errors.Join(missing(configuration, n.options.BinDirs, false)...)
	}
	if err == nil {
		err = n.askStatus(configuration)
	}
	if n.base.Err() != nil {
		return // the daemon ends, which says nothing of the network
	}
	last := d.status.Load()
	if errors.Is(err, errLate) && last != nil && last.err == nil && !last.slow {
		// One slow answer is a sign of a busy machine rather than of the network.
		n.options.Logger.Warn("the network plugins are slow to answer STATUS: they are asked again", "err", err)
		d.status.Store(&status{slow: true})
		return
	}
	d.status.Store(&status{err: err})
	if last == nil {
		close(d.asked)
	}
	if last == nil || (last.err == nil) != (err == nil) {
		n.options.Logger.Info("network readiness changed", "dir", d.path, "ready", err == nil, "err", err)
	}
	if err == nil && last != nil && last.err != nil {
		n.hurryAll()
	}
}

func (n *CNI) askStatus(c *Configuration) error {
	if n.isStuck("STATUS", c.Name) {
		return fmt.Errorf("CNI STATUS: %w", errStuck)
	}
	asked := Attachment{Network: c.Name, Config: c.Bytes}
	return n.call(context.Background(), nil, asked, "STATUS", n.limits.Load().Status, func(_ context.Context, cni gocni.CNI) error {
		return cni.Status()
	})
}
