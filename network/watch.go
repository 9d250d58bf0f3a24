package network

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// ErrNoConfiguration says that no file of the configuration directory can be used.
var ErrNoConfiguration = errors.New("no CNI configuration")

// snapshot is one look at the configuration directory. It is immutable.
type snapshot struct {
	// configuration is what the next pod gets, nil if there is none; good are
	// all that could be used.
	configuration *Configuration
	good          []*Configuration
	problems      []error
	signature     string
	loaded        time.Time
}

// watch looks at the configuration directories again and again. Looking costs
// some microseconds; in return there is one mechanism for a file renamed in, a
// symlink switched, a directory removed and made again, and a network file
// system, each of which needs its own care with inotify(7).
func (n *CNI) watch(ctx context.Context) {
	for {
		n.awaitPeriod(ctx, nil, func(l Limits) time.Duration { return l.Reload })
		if ctx.Err() != nil {
			return
		}
		n.Reload()
	}
}

// Reload reads the configuration directories in which anything has changed.
func (n *CNI) Reload() {
	n.reload()
	for _, d := range *n.others.Load() {
		d.reload()
	}
}

// reload reads the directory if anything in it has changed.
func (d *Directory) reload() {
	signature := d.signature()
	last := d.current.Load()
	if !d.readAgain.Swap(false) && last.signature == signature {
		return
	}
	next := &snapshot{signature: signature, loaded: time.Now()}
	next.good, next.problems = readDirectory(d.path, last.good)
	if len(next.good) > 0 {
		next.configuration = next.good[0]
	}
	if d.isNodes() {
		d.owner.standIn(next)
	}
	d.current.Store(next)
	if !next.saysAgain(last) {
		d.logChange(next)
	}
	if last.configuration != nil && next.configuration != nil && !bytes.Equal(last.configuration.Bytes, next.configuration.Bytes) {
		d.owner.retries.all() // what no DEL could undo may be corrected
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
		n.masquerade.use(context.WithoutCancel(n.base), nil)
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
		next.configuration, err = network.configuration(subnets, n.masquerade.use(context.WithoutCancel(n.base), masqueraded))
		if n.masquerade.tryAgain() {
			n.readAgain.Store(true)
		}
	}
	if err != nil {
		next.problems = append(next.problems, err)
	}
}

// saysAgain reports whether a snapshot has nothing new for people.
func (s *snapshot) saysAgain(last *snapshot) bool {
	return !last.loaded.IsZero() && last.signature == s.signature && (s.configuration == nil) == (last.configuration == nil) && fmt.Sprint(s.problems) == fmt.Sprint(last.problems)
}

func (d *Directory) logChange(s *snapshot) {
	for _, problem := range s.problems {
		d.owner.options.Logger.Warn("network configuration skipped", "err", problem)
	}
	if s.configuration == nil {
		d.owner.options.Logger.Info("no network configuration", "dir", d.path)
		return
	}
	d.owner.options.Logger.Info("network configuration loaded", "network", s.configuration.Name, "file", s.configuration.File)
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
		return
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
	if s.configuration == nil {
		return nil, d.noConfiguration(s)
	}
	return s.configuration, nil
}

func (d *Directory) noConfiguration(s *snapshot) error {
	text := make([]string, 0, len(s.problems))
	for _, problem := range s.problems {
		text = append(text, problem.Error())
	}
	switch {
	case len(text) > 0:
	case d.isNodes():
		text = append(text, "put a .conflist there, or set default_network.enabled")
	default:
		text = append(text, "put a .conflist there")
	}
	return fmt.Errorf("%w in %s: %s", ErrNoConfiguration, d.path, strings.Join(text, "; "))
}

// Problems are the files of the directory that cannot be used, each with its
// reason.
func (d *Directory) Problems() []error { return d.current.Load().problems }
