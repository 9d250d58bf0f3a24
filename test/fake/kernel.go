package fake

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/sandbox"
)

// proc is a process. Its pid is higher than the kernel's, so no real process is meant.
type proc struct {
	pid   int
	ended chan struct{}
	end   func()
}

// spawn makes a process. n.mu is held.
func (n *Node) spawn() *proc {
	n.lastPID++
	p := &proc{pid: n.lastPID, ended: make(chan struct{})}
	p.end = sync.OnceFunc(func() { close(p.ended) })
	n.processes[p.pid] = p
	return p
}

func (p *proc) started() uint64 { return uint64(p.pid) }

func (p *proc) Ended() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

// handle is a pidfd.
type handle struct {
	*proc
	d      *Daemon
	closed chan struct{}
	close  func()
}

func (p *proc) open() *handle {
	h := &handle{proc: p, closed: make(chan struct{})}
	h.close = sync.OnceFunc(func() { close(h.closed) })
	return h
}

func (h *handle) Wait() error {
	select {
	case <-h.ended:
		return nil
	case <-h.closed:
		return os.ErrClosed
	}
}

func (h *handle) Close() error {
	h.close()
	return nil
}

func (h *handle) Reap()        {}
func (h *handle) Doomed() bool { return false }

func (h *handle) Kill(time.Duration) error {
	if h.d != nil {
		h.d.live()
		h.d.EndProcess(h.pid)
	}
	h.end()
	return nil
}

// EndProcess ends a process, and its supervisor reports the end.
func (n *Node) EndProcess(pid int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.processes[pid].end()
	for _, c := range n.held {
		if c.process == nil || c.process.pid != pid {
			continue
		}
		n.forget("process", c.id)
		if s := n.supervisors[c.dir]; s != nil && !s.process.Ended() {
			s.ended(c, 137, true)
		}
	}
}

// kernel is sandbox.Kernel.
type kernel struct{ *Daemon }

func (k kernel) OpenProcess(facts process.Facts) (sandbox.Process, error) {
	k.live()
	k.mu.Lock()
	defer k.mu.Unlock()
	p := k.processes[facts.PID]
	if p == nil || p.started() != facts.StartTime || p.Ended() {
		return nil, fmt.Errorf("process %d: %w", facts.PID, process.ErrGone)
	}
	opened := p.open()
	opened.d = k.Daemon
	return opened, nil
}

type holder struct {
	*Daemon
	name string
}

func (k kernel) StartHolder(string, []specs.LinuxIDMapping, []specs.LinuxIDMapping) (sandbox.Holder, error) {
	k.live()
	k.mu.Lock()
	defer k.mu.Unlock()
	h := &holder{k.Daemon, fmt.Sprint(k.spawn().pid)}
	k.note("holder", h.name)
	k.holders.Store(h, nil)
	return h, nil
}

func (h *holder) Namespace(kind string) string { return kind }

func (h *holder) End() error {
	h.holders.Delete(h)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.forget("holder", h.name)
	return nil
}

func (k kernel) SetSysctls(string, [][2]string) error { k.live(); return nil }
func (k kernel) LoopbackUp(string) error              { k.live(); return nil }
func (k kernel) Chown(string, int, int) error         { k.live(); return nil }
func (k kernel) MountTmpfs(_, target, _ string) error { return k.mount(target) }

func (d *Daemon) mount(target string) error {
	d.live()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.note("mount", target)
	return nil
}

// Unmount removes what is in the mount, too.
func (k kernel) Unmount(target string) error {
	k.live()
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.made["mount "+target] {
		return unix.EINVAL
	}
	k.forget("mount", target)
	return errors.Join(os.RemoveAll(target), os.Mkdir(target, 0o700))
}

// namespaces is sandbox.Namespaces.
type namespaces struct {
	*Daemon
	kind, mark string
}

func (n *namespaces) Path(id string) string { return filepath.Join(n.Dir, n.kind, n.mark+id) }

func (n *namespaces) Create(id string) error { return n.Pin(id, "new") }

func (n *namespaces) Pin(id, _ string) error {
	n.live()
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.made[n.kind+" "+id] {
		return fs.ErrExist
	}
	n.note(n.kind, id)
	return nil
}

func (n *namespaces) Alive(id string) bool { return n.Made(n.kind, id) }

func (n *namespaces) Remove(id string) error {
	n.live()
	n.mu.Lock()
	defer n.mu.Unlock()
	n.forget(n.kind, id)
	return nil
}

func (n *namespaces) IDs() ([]string, error) { return n.names(n.kind), nil }

// names returns the names of a kind in the leak table.
func (n *Node) names(kind string) (names []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for made := range n.made {
		if name, is := strings.CutPrefix(made, kind+" "); is {
			names = append(names, name)
		}
	}
	return names
}

// cgroups is sandbox.Cgroups, and sweep.Cgroups.
type cgroups struct{ *Daemon }

func (c cgroups) Exists(path string) bool { return c.Made("cgroup", path) }

func (c cgroups) Processes(path string) (pids []int, err error) {
	c.live()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, h := range c.held {
		if cgroup.Path(h.cgroup) == path && h.process != nil && !h.process.Ended() {
			pids = append(pids, h.process.pid)
		}
	}
	return pids, nil
}

func (c cgroups) Remove(path string, _ time.Duration) error {
	pids, err := c.Processes(path)
	for _, pid := range pids {
		c.EndProcess(pid)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forget("cgroup", path)
	return err
}

func (c cgroups) Find(ours func(name string) bool, _ []string) ([]string, error) {
	return slices.DeleteFunc(c.names("cgroup"), func(path string) bool { return !ours(filepath.Base(path)) }), nil
}

// images is container.Images with one image, "image".
type images struct{ *Daemon }

func (images) Get(ref string) (image.Image, error) {
	if ref != "image" {
		return image.Image{}, fmt.Errorf("image %q: %w", ref, errdefs.ErrNotFound)
	}
	i := image.Image{ID: "sha256:image"}
	i.Spec.Config.Cmd = []string{"/program"}
	return i, nil
}

func (i images) Prepare(_ context.Context, key, _ string, _ image.PrepareOptions) error {
	i.live()
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.made["snapshot "+key] {
		return fmt.Errorf("snapshot %s: %w", key, errdefs.ErrAlreadyExists)
	}
	i.note("snapshot", key)
	return nil
}

func (i images) Mount(_ context.Context, _, target, _ string) error {
	return errors.Join(os.MkdirAll(target, 0o700), i.mount(target))
}

func (i images) Unmount(target string) error {
	if err := kernel(i).Unmount(target); !errors.Is(err, unix.EINVAL) {
		return err
	}
	return nil
}

func (i images) Snapshots(context.Context) ([]string, error) { return i.names("snapshot"), nil }

func (i images) RemoveSnapshot(_ context.Context, key string) error {
	i.live()
	i.mu.Lock()
	defer i.mu.Unlock()
	i.forget("snapshot", key)
	return nil
}
