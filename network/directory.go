package network

import (
	"context"
	"maps"
	"sync"
	"sync/atomic"
)

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
	// left ends, by leave, when nothing follows the directory any more.
	left  context.Context
	leave context.CancelFunc
}

func (n *CNI) newDirectory(path string) *Directory {
	d := &Directory{owner: n, path: path, asked: make(chan struct{}), changed: make(chan struct{}, 1)}
	d.left, d.leave = context.WithCancel(context.Background())
	d.current.Store(&snapshot{})
	return d
}

// isNodes reports whether this is the node's own, which the embedded network
// stands in for.
func (d *Directory) isNodes() bool { return d == d.owner.Directory }

// In is the configuration directory at a path; "" is the node's own. One that is
// not among those of SetDirectories is read, and nothing follows it.
func (n *CNI) In(path string) *Directory {
	if path == "" || path == n.path {
		return n.Directory
	}
	if d := (*n.others.Load())[path]; d != nil {
		return d
	}
	d := n.newDirectory(path)
	d.leave()
	return d
}

// directories are all of them, the node's own last.
func (n *CNI) directories() (all []*Directory) {
	for _, d := range *n.others.Load() {
		all = append(all, d)
	}
	return append(all, n.Directory)
}

// SetDirectories puts other further directories in the place of those that are
// followed; "" and the node's own are left out. What is in both stays as it is. It
// is not called twice at a time.
func (n *CNI) SetDirectories(paths []string) {
	last, next := *n.others.Load(), make(map[string]*Directory)
	for _, path := range paths {
		if path == "" || path == n.path {
			continue
		}
		if next[path] = last[path]; next[path] == nil {
			next[path] = n.newDirectory(path)
		}
	}
	n.others.Store(&next)
	for path, d := range last {
		if next[path] == nil {
			d.leave() // nothing waits for its first STATUS any more
		}
	}
	select {
	case n.othersChanged <- struct{}{}:
	default:
	}
}

// followOthers follows the STATUS of the further directories, each for itself, as
// long as they are there.
func (n *CNI) followOthers(ctx context.Context) {
	var wait sync.WaitGroup
	defer wait.Wait()
	followed := make(map[*Directory]bool)
	for {
		maps.DeleteFunc(followed, func(d *Directory, _ bool) bool { return d.left.Err() != nil })
		for _, d := range *n.others.Load() {
			if followed[d] {
				continue
			}
			followed[d] = true
			wait.Go(func() {
				ctx, end := context.WithCancel(ctx)
				defer end()
				defer context.AfterFunc(d.left, end)()
				d.followStatus(ctx)
			})
		}
		select {
		case <-ctx.Done():
			return
		case <-n.othersChanged:
		}
	}
}
