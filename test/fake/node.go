// Package fake is a node in memory. Supervisors, processes, cgroups, namespaces, mounts, snapshots and CNI plugins only
// keep a table of what was made. A Daemon has the real stores of pods, containers, attachments and supervisors on top
// of it, with real files in a temporary directory. So the logic of a daemon, and its death at any point, can be tested
// without root. Tests use it inside a bubble of testing/synctest: limits and pauses pass at once.
package fake

import (
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/handler"
	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/internal/node"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/internal/step/failpoint"
	"github.com/minicri/minicri/internal/sweep"
	"github.com/minicri/minicri/network"
	"github.com/minicri/minicri/network/runner"
	"github.com/minicri/minicri/sandbox"
	"github.com/minicri/minicri/supervisor/client"
	"github.com/minicri/minicri/test/harness"
)

// Build names the supervisor of new pods.
const Build = "build-1"

// Node is what outlives daemons.
type Node struct {
	Dir, Root, State string
	Limits           sandbox.Limits
	NetworkLimits    network.Limits
	Log              harness.Buffer
	// Change, if set, changes the options of later daemons.
	Change func(*container.Options)

	t       testing.TB
	daemons []*Daemon
	over    context.Context // ends with the test, for what dead daemons left waiting
	finish  context.CancelFunc

	mu          sync.Mutex
	made        map[string]bool // the leak table: what was made and not removed, by kind and name
	armed       map[string]*armed
	calls       []Call
	booted      context.Context // ends with the boot
	reboot      context.CancelFunc
	processes   map[int]*proc
	held        map[string]*held // containers and pauses, by id
	supervisors map[string]*supervisor
}

type armed struct {
	do  func() error
	hit chan struct{}
	one sync.Once
}

// New makes a node without a daemon, for a test in a bubble.
func New(t testing.TB) *Node {
	dir := inMemory(t)
	n := &Node{
		Dir: dir, Root: filepath.Join(dir, "root"), State: filepath.Join(dir, "state"), t: t,
		Limits: sandbox.Limits{Run: time.Minute, Destroy: time.Minute, Create: time.Minute, Kill: 10 * time.Second},
		NetworkLimits: network.Limits{
			Add: 30 * time.Second, Del: 30 * time.Second, Check: time.Second, Status: time.Second, GC: time.Second,
			DetachTries: 5, DetachTime: 30 * time.Second, GiveUpTries: 1000, GiveUpTime: time.Hour,
			RetryFirst: time.Second, RetryMost: time.Minute, Reload: time.Hour,
		},
		made: make(map[string]bool), armed: make(map[string]*armed), processes: make(map[int]*proc),
		held: make(map[string]*held), supervisors: make(map[string]*supervisor),
	}
	n.over, n.finish = context.WithCancel(context.Background())
	n.booted, n.reboot = context.WithCancel(context.Background())
	for _, name := range []string{"root", "state", "net.d", "bin", "runs", "cache", "netns"} {
		harness.Check(t, os.MkdirAll(filepath.Join(dir, name), 0o755))
	}
	for _, plugin := range Chain {
		harness.Check(t, os.WriteFile(filepath.Join(dir, "bin", plugin), nil, 0o755))
	}
	n.Configure("10-chain.conflist", fmt.Sprintf(Conflist, ""))
	t.Cleanup(n.end)
	return n
}

// inMemory makes a directory where fsync costs nothing, if programs can be executed there, as pause has to be.
func inMemory(t testing.TB) string {
	dir, err := os.MkdirTemp("/dev/shm", "minicri-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { harness.Check(t, os.RemoveAll(dir)) })
	var fs unix.Statfs_t
	if unix.Statfs(dir, &fs) != nil || fs.Flags&unix.ST_NOEXEC != 0 {
		return t.TempDir()
	}
	return dir
}

// Configure writes a file of the network configuration.
func (n *Node) Configure(name, content string) {
	harness.Check(n.t, os.WriteFile(filepath.Join(n.Dir, "net.d", name), []byte(content), 0o600))
}

// Arm has the point call do each time it is reached, until Disarm. The channel closes the first time.
func (n *Node) Arm(point string, do func() error) (hit <-chan struct{}) {
	a := &armed{do: do, hit: make(chan struct{})}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.armed[point] = a
	return a.hit
}

// Hang is for Arm: the point hangs until the end of the test.
func (n *Node) Hang() error {
	<-n.over.Done()
	return nil
}

// Disarm disarms all points.
func (n *Node) Disarm() {
	n.mu.Lock()
	defer n.mu.Unlock()
	clear(n.armed)
}

func (n *Node) reach(point string) error {
	n.mu.Lock()
	a := n.armed[point]
	n.mu.Unlock()
	if a == nil {
		return nil
	}
	a.one.Do(func() { close(a.hit) })
	return a.do()
}

// Leaks returns the leak table, and the files of pods, containers, attachments and supervisors' containers, sorted.
func (n *Node) Leaks() []string {
	n.mu.Lock()
	left := slices.Collect(maps.Keys(n.made))
	n.mu.Unlock()
	for _, dir := range []string{
		"root/sandboxes", "root/containers", "root/container-facts", "root/container-volumes", "root/attachments",
		"state/facts", "state/sandboxes", "state/containers", "state/shims/*/records", "state/shims/*/exits",
		"cache/results", "runs",
	} {
		found, _ := filepath.Glob(filepath.Join(n.Dir, dir, "[^.]*")) // without writes that a dead daemon has not finished
		for _, path := range found {
			left = append(left, "file "+strings.TrimPrefix(path, n.Dir+"/"))
		}
	}
	slices.Sort(left)
	return left
}

// Reboot ends everything of the kernel. Records, snapshots and the plugins' addresses stay.
func (n *Node) Reboot() {
	boot, err := process.BootID()
	harness.Check(n.t, err)
	n.mu.Lock()
	clear(n.held)
	clear(n.supervisors)
	for _, p := range n.processes {
		p.end()
	}
	maps.DeleteFunc(n.made, func(name string, _ bool) bool {
		return !strings.HasPrefix(name, "address ") && !strings.HasPrefix(name, "snapshot ")
	})
	n.reboot()
	n.booted, n.reboot = context.WithCancel(context.Background())
	n.mu.Unlock()
	for _, dir := range []string{"state", "runs"} {
		harness.Check(n.t, os.RemoveAll(filepath.Join(n.Dir, dir)))
		harness.Check(n.t, os.MkdirAll(filepath.Join(n.Dir, dir), 0o755))
	}
	err = filepath.WalkDir(n.Root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || filepath.Ext(path) != ".json" {
			return err
		}
		content, err := os.ReadFile(path)
		if err != nil || !bytes.Contains(content, []byte(boot)) {
			return err
		}
		return os.WriteFile(path, bytes.ReplaceAll(content, []byte(boot), []byte("another boot")), 0o600)
	})
	harness.Check(n.t, err)
}

// end ends all goroutines of the daemons.
func (n *Node) end() {
	n.Disarm()
	for _, d := range n.daemons {
		d.Die()
	}
	for _, s := range n.serving() {
		s.process.end()
	}
	n.finish()
	for _, d := range n.daemons {
		d.cancel()
		if d.Supervisors != nil {
			d.Supervisors.Close()
		}
	}
	time.Sleep(time.Hour) // longer than all that waits has a limit
}

// Daemon is one run of the daemon on a node.
type Daemon struct {
	*Node
	Ctx         context.Context // for calls; it has the daemon's failpoints
	Supervisors *client.Set
	Networks    *network.CNI
	Sandboxes   *sandbox.Store
	Containers  *container.Store
	Netns       *Namespaces

	cancel context.CancelFunc
	dead   context.Context
	die    context.CancelFunc
	ends   sync.Map // what the kernel closes when the daemon dies, with how
}

// Start starts a daemon.
func (n *Node) Start() *Daemon {
	d, started := n.Begin()
	harness.Check(n.t, <-started)
	return d
}

// Begin starts a daemon, which may die before it has started.
func (n *Node) Begin() (d *Daemon, started <-chan error) {
	d = &Daemon{Node: n}
	d.Ctx, d.cancel = context.WithCancel(failpoint.With(context.Background(), d.hit))
	d.dead, d.die = context.WithCancel(context.Background())
	n.daemons = append(n.daemons, d)
	done := make(chan error, 1)
	go func() { done <- d.open() }()
	return d, done
}

func (d *Daemon) open() error {
	identity, err := node.Open(d.Root, d.State, filepath.Join(d.Dir, "netns"))
	if err != nil {
		return err
	}
	logger := slog.New(slog.NewTextHandler(&d.Log, nil))
	d.Supervisors, err = client.NewSet(client.SetOptions{
		Dir: filepath.Join(d.State, "shims"), Start: client.StartOptions{Build: Build}, Host: host{d}, Logger: logger,
		Answer: d.Limits.Kill,
	})
	if err != nil {
		return err
	}
	programs, err := runner.Open(cgroup.Group{Dir: filepath.Join(d.Dir, "runs"), V2: true}, identity.PluginMark())
	if err != nil {
		return err
	}
	programs.Exec = d.exec
	userns := &Namespaces{d, "userns", identity.Mark()}
	d.Netns = &Namespaces{d, "netns", identity.Mark()}
	d.Networks, err = network.Open(d.Ctx, network.Options{
		ConfDir: filepath.Join(d.Dir, "net.d"), BinDirs: []string{filepath.Join(d.Dir, "bin")}, Root: d.Root,
		Mark: identity.PluginMark(), Runs: runs{programs, d}, CacheDir: filepath.Join(d.Dir, "cache"),
		Namespaces: d.Netns, WithoutRules: true, Limits: d.NetworkLimits, Logger: logger,
		Later: func(id string, row step.Row) { logger.Info("row", "id", id, "step", row.Step, "err", row.Error) },
	})
	if err != nil {
		return err
	}
	pods := sandbox.Options{
		Root: d.Root, State: d.State, Node: identity, Supervisors: d.Supervisors, Networks: d.Networks, Kernel: kernel{d},
		Hierarchies: cgroups{d}, Netns: d.Netns, Userns: userns, CgroupParent: "/pods", Limits: d.Limits, Logger: logger,
		Handlers: handler.New(nil, handler.Features{UserNamespaces: true, RecursiveReadOnlyMounts: true}),
		Machine: machine.Machine{
			CanLowerOOMAdj: true, UserNamespaces: true, CgroupV2: true, Controllers: []string{"cpu", "memory", "pids"},
		},
	}
	options := container.Options{Options: pods, Supervisors: d.Supervisors, Images: images{d}, Places: &sweep.Places{
		Node: identity, Hierarchies: cgroups{d}, Netns: d.Netns, Userns: userns,
		Root: d.Root, State: d.State, Kill: d.Limits.Kill,
	}}
	if d.Change != nil {
		d.Change(&options)
	}
	if d.Sandboxes, err = sandbox.Open(d.Ctx, options.Options); err != nil {
		return err
	}
	options.Sandboxes = d.Sandboxes
	if d.Containers, err = container.Open(d.Ctx, options); err != nil {
		return err
	}
	d.Sandboxes.SetContainers(d.Containers)
	go d.Networks.Run(d.Ctx)
	return nil
}

// hit is what the daemon calls at its points. A dead one goes on to write, without success: it may hold a mutex, and a
// bubble whose goroutines wait for one does not come to rest.
func (d *Daemon) hit(point string) error {
	if strings.HasPrefix(point, "rename ") {
		err := context.Canceled
		if d.dead.Err() == nil {
			err = d.reach(point)
		}
		if d.dead.Err() != nil {
			return context.Canceled
		}
		return err
	}
	d.live()
	err := d.reach(point)
	d.live()
	return err
}

// live returns unless the daemon is dead: then its goroutine does nothing until the end of the test.
func (d *Daemon) live() {
	if d.dead.Err() != nil {
		<-d.over.Done()
		runtime.Goexit()
	}
}

// lock locks the node for a daemon that lives, and returns how to unlock it.
func (d *Daemon) lock() func() {
	d.live()
	d.mu.Lock()
	return d.mu.Unlock
}

// Kill ends the daemon as SIGKILL does. It returns when what it left to others has come to rest.
func (d *Daemon) Kill() {
	d.Die()
	synctest.Wait()
}

// Die is Kill for a point.
func (d *Daemon) Die() {
	if d.dead.Err() != nil {
		return
	}
	d.die()
	d.ends.Range(func(_, end any) bool { return end.(func() error)() == nil })
}

// Stop ends the daemon in order, within a limit for what is under way.
func (d *Daemon) Stop(limit time.Duration, requests *sync.WaitGroup) {
	d.Containers.Cancel()
	d.Networks.Leave()
	drained := make(chan struct{})
	go func() { requests.Wait(); close(drained) }()
	select {
	case <-drained:
	case <-time.After(limit):
	}
	d.Networks.Close()
	d.Sandboxes.Close()
	d.Containers.Close()
	<-drained
	d.cancel()
	d.Supervisors.Close()
	d.Kill()
}
