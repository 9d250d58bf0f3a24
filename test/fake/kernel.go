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
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/sandbox"
)

// proc is a process: a context that ends with it. Its pid is higher than the kernel's, so no real process is meant.
type proc struct {
	context.Context
	pid int
	end context.CancelFunc
}

// spawn makes a process. n.mu is held.
func (n *Node) spawn() *proc {
	p := &proc{pid: 1<<22 + len(n.processes)}
	p.Context, p.end = context.WithCancel(context.Background())
	n.processes[p.pid] = p
	return p
}

func (p *proc) started() uint64 { return uint64(p.pid) }
func (p *proc) Ended() bool     { return p.Err() != nil }

// handle is a pidfd.
type handle struct {
	*proc
	d      *Daemon
	closed context.Context
	close  context.CancelFunc
}

func (d *Daemon) handle(p *proc) *handle {
	h := &handle{proc: p, d: d}
	h.closed, h.close = context.WithCancel(context.Background())
	return h
}

func (h *handle) Wait() error {
	select {
	case <-h.Done():
		return nil
	case <-h.closed.Done():
		return os.ErrClosed
	}
}

func (h *handle) Close() error { h.close(); return nil }
func (h *handle) Reap()        {}
func (h *handle) Doomed() bool { return false }

func (h *handle) Kill(time.Duration) error {
	h.d.live()
	h.d.EndProcess(h.pid)
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

// kernel is sandbox.Kernel. Sysctls and owners are not kept.
type kernel struct{ *Daemon }

func (k kernel) OpenProcess(facts process.Facts) (sandbox.Process, error) {
	defer k.lock()()
	p := k.processes[facts.PID]
	if p == nil || p.started() != facts.StartTime || p.Ended() {
		return nil, fmt.Errorf("process %d: %w", facts.PID, process.ErrGone)
	}
	return k.handle(p), nil
}

// holder ends with its daemon.
type holder struct {
	*Daemon
	name string
}

func (k kernel) StartHolder(string, []specs.LinuxIDMapping, []specs.LinuxIDMapping) (sandbox.Holder, error) {
	defer k.lock()()
	h := &holder{k.Daemon, fmt.Sprint(k.spawn().pid)}
	k.note("holder", h.name)
	k.ends.Store(h, h.End)
	return h, nil
}

func (h *holder) Namespace(kind string) string { return kind }

func (h *holder) End() error {
	h.ends.Delete(h)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.forget("holder", h.name)
	return nil
}

func (k kernel) SetSysctls(string, [][2]string) error { k.live(); return nil }
func (k kernel) LoopbackUp(string) error              { k.live(); return nil }
func (k kernel) Chown(string, int, int) error         { k.live(); return nil }
func (k kernel) MountTmpfs(_, target, _ string) error { return k.make("mount", target, nil) }

// Unmount removes what is in the mount, too.
func (k kernel) Unmount(target string) error {
	if err := k.remove("mount", target, unix.EINVAL); err != nil {
		return err
	}
	return errors.Join(os.RemoveAll(target), os.Mkdir(target, 0o700))
}

// Namespaces is sandbox.Namespaces for one kind.
type Namespaces struct {
	*Daemon
	kind, mark string
}

// Path implements sandbox.Namespaces, as do the others.
func (n *Namespaces) Path(id string) string  { return filepath.Join(n.Dir, n.kind, n.mark+id) }
func (n *Namespaces) Create(id string) error { return n.make(n.kind, id, fs.ErrExist) }
func (n *Namespaces) Pin(id, _ string) error { return n.make(n.kind, id, fs.ErrExist) }
func (n *Namespaces) Alive(id string) bool   { return n.Made(n.kind, id) }
func (n *Namespaces) IDs() ([]string, error) { return n.names(n.kind), nil }

// Remove has the point "netns remove".
func (n *Namespaces) Remove(id string) error {
	if err := n.reach(n.kind + " remove"); err != nil {
		return err
	}
	return n.remove(n.kind, id, nil)
}

// cgroups is sandbox.Cgroups, and sweep.Cgroups.
type cgroups struct{ *Daemon }

func (c cgroups) Exists(path string) bool { return c.Made("cgroup", path) }

func (c cgroups) Processes(path string) (pids []int, err error) {
	defer c.lock()()
	for _, h := range c.held {
		if cgroup.Path(h.cgroup) == path && h.process != nil && !h.process.Ended() {
			pids = append(pids, h.process.pid)
		}
	}
	return pids, nil
}

func (c cgroups) Remove(path string, _ time.Duration) error {
	pids, _ := c.Processes(path)
	for _, pid := range pids {
		c.EndProcess(pid)
	}
	return c.remove("cgroup", path, nil)
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
	return i.make("snapshot", key, errdefs.ErrAlreadyExists)
}

func (i images) Mount(_ context.Context, _, target, _ string) error {
	return errors.Join(os.MkdirAll(target, 0o700), i.make("mount", target, nil))
}

func (i images) Unmount(target string) error {
	if err := kernel(i).Unmount(target); !errors.Is(err, unix.EINVAL) {
		return err
	}
	return nil
}

func (i images) Snapshots(context.Context) ([]string, error) { return i.names("snapshot"), nil }

func (i images) RemoveSnapshot(_ context.Context, key string) error {
	return i.remove("snapshot", key, nil)
}

// make notes an object in the leak table. exists is the error if it is there already, nil for none.
func (d *Daemon) make(kind, name string, exists error) error {
	defer d.lock()()
	if exists != nil && d.made[kind+" "+name] {
		return fmt.Errorf("%s %s: %w", kind, name, exists)
	}
	d.note(kind, name)
	return nil
}

// remove removes an object from the leak table. missing is the error if it is not there, nil for none.
func (d *Daemon) remove(kind, name string, missing error) error {
	defer d.lock()()
	if missing != nil && !d.made[kind+" "+name] {
		return fmt.Errorf("%s %s: %w", kind, name, missing)
	}
	d.forget(kind, name)
	return nil
}

func (n *Node) note(kind, name string)   { n.made[kind+" "+name] = true }
func (n *Node) forget(kind, name string) { delete(n.made, kind+" "+name) }

// Made reports whether the leak table has an object.
func (n *Node) Made(kind, name string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.made[kind+" "+name]
}

// names returns the objects of a kind.
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
