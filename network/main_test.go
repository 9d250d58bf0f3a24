package network

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/namespace"
	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/isolate"
)

// TestMain keeps the links, rules and mounts that the tests make away from the machine.
func TestMain(m *testing.M) { os.Exit(isolate.Run(m, prepareInside)) }

func prepareInside() error {
	if err := os.Setenv(markName, strconv.Itoa(os.Getpid())); err != nil {
		return err
	}
	if _, err := os.Stat(filepath.Join(realPlugins, "bridge")); err != nil {
		return fmt.Errorf("the CNI plugins are not built, run 'make setup': %w", err)
	}
	// Another run of these tests on the machine has the same ids, and a result in the cache means that ADD succeeded.
	err := errors.Join(os.MkdirAll(libcni.CacheDir, 0o700), unix.Mount("tmpfs", libcni.CacheDir, "tmpfs", 0, ""))
	if err != nil {
		return err
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	return netlink.LinkSetUp(lo)
}

const (
	// markName is the environment variable that plugins of this run carry.
	markName = "NETWORK_TEST_MARK"
	// realPlugins are those that a node has, testPlugins those of the tests.
	realPlugins = "../bin/cni"
	testPlugins = "testdata/plugins"
	// within is far more than anything takes that has no limit of its own.
	within = time.Minute
)

// node is a network of a node, in directories of its own.
type node struct {
	*CNI
	Options
	// scripted is the folder of the plugin "scripted".
	scripted string
	log      *harness.Buffer
	// given are the addresses of pods, by id.
	given map[string][]netip.Addr
}

// newNode opens a network over an empty configuration directory. Periods are
// those of the defaults, in tenths of the time; no limit is reached.
func newNode(t *testing.T, change func(*Options)) *node {
	n := &node{scripted: t.TempDir(), log: &harness.Buffer{}, given: make(map[string][]netip.Addr)}
	namespaces := newNamespaces(t, "net-")
	n.Options = Options{
		ConfDir: t.TempDir(), BinDirs: []string{absolute(t, realPlugins), absolute(t, testPlugins)},
		Root: t.TempDir(), CgroupParent: newCgroup(t), Mark: "minicri-cni-", Namespaces: namespaces,
		Limits: Limits{
			Add: within, Del: within, Check: within, Status: within, GC: within, DetachTries: 5, DetachTime: 30 * time.Second,
			GiveUpTries: 1000, GiveUpTime: time.Hour, RetryFirst: 100 * time.Millisecond, RetryMost: time.Second,
			Reload: 100 * time.Millisecond, StatusPeriod: 500 * time.Millisecond,
		},
		Logger: slog.New(slog.NewTextHandler(n.log, nil)),
	}
	if change != nil {
		change(&n.Options)
	}
	t.Cleanup(func() { must(t, os.RemoveAll(filepath.Join(libcni.CacheDir, "results"))) }) // the next test has the same ids
	t.Cleanup(func() { n.endLeftRuns(t) })
	n.reopen(t)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the log:\n%s", n.log)
		}
	})
	return n
}

// newScripted is newNode with the plugin "scripted" as its network.
func newScripted(t *testing.T, change func(*Options)) *node {
	n := newNode(t, change)
	n.configure(t, "10.conflist", "net", n.script())
	return n
}

// endLeftRuns has a last daemon wait for what the one before has left to it: a STATUS
// or a GC that took long while that ended.
func (n *node) endLeftRuns(t *testing.T) {
	t.Helper()
	if len(n.runDirs(t)) == 0 {
		return
	}
	n.Options.Limits.GCPeriod, n.Options.Limits.CheckPeriod = 0, 0
	last, err := Open(context.Background(), n.Options)
	if err != nil {
		t.Error(err)
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wait sync.WaitGroup
	wait.Go(func() { last.Run(ctx) })
	harness.Eventually(t, "the runs that were left are over", func() bool { return len(n.runDirs(t)) == 0 })
	cancel()
	wait.Wait()
	last.Close()
}

// reopen is what a daemon that comes next does.
func (n *node) reopen(t *testing.T) {
	if n.CNI != nil {
		// What waits in the background ends with its daemon: it would kill what
		// the next one runs in the cgroup that it waits for.
		n.CNI.end()
		n.CNI.background.Wait()
	}
	networks, err := Open(t.Context(), n.Options)
	must(t, err)
	n.CNI = networks
	t.Cleanup(networks.Close)
}

// newCgroup is a parent for the cgroups of plugin runs, which are all gone when the test ends.
func newCgroup(t *testing.T) string {
	path := fmt.Sprintf("/minicri-unit-net-%d-%d", os.Getpid(), time.Now().UnixNano())
	parent, err := cgroup.GroupParent(path)
	must(t, err)
	must(t, parent.Make())
	t.Cleanup(func() {
		left, err := os.ReadDir(parent.Dir)
		for _, entry := range left {
			harness.Want(t, !entry.IsDir(), "the cgroup of a plugin run is left: %s", entry.Name())
		}
		harness.Check(t, errors.Join(err, parent.Kill(within), parent.Remove()))
	})
	return path
}

// mark is in the environment of every plugin that inherits that of this process.
func mark() string { return markName + "=" + os.Getenv(markName) }

// ready is Ready, with a limit that is never reached.
func (n *node) ready(t *testing.T) error { return n.Ready(harness.Limited(t)) }

// runs follows changes, for as long as the test takes or until stopped.
func (n *node) runs(t *testing.T) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan struct{})
	networks := n.CNI
	go func() {
		defer close(ended)
		networks.Run(ctx)
	}()
	stop = sync.OnceFunc(func() {
		cancel()
		<-ended
	})
	t.Cleanup(stop)
	return stop
}

// configure puts a configuration list into the directory.
func (n *node) configure(t *testing.T, file, name string, plugins ...map[string]any) {
	put(t, filepath.Join(n.ConfDir, file), conflist(t, name, plugins...))
}

func conflist(t *testing.T, name string, plugins ...map[string]any) string {
	return marshal(t, map[string]any{"cniVersion": "1.1.0", "name": name, "plugins": plugins})
}

// script is the plugin "scripted" in a configuration.
func (n *node) script() map[string]any { return map[string]any{"type": "scripted", "dir": n.scripted} }

// tell makes the plugin "scripted" fail or hang from now on: "DEL.fail".
func (n *node) tell(t *testing.T, what string) { put(t, filepath.Join(n.scripted, what), "") }

func (n *node) untell(t *testing.T, what string) { must(t, os.Remove(filepath.Join(n.scripted, what))) }

// calls are the calls of a verb that the plugin "scripted" got.
func (n *node) calls(t *testing.T, verb string) (calls []string) {
	data, err := os.ReadFile(filepath.Join(n.scripted, "log"))
	harness.Need(t, err == nil || errors.Is(err, os.ErrNotExist), "%v", err)
	for line := range strings.Lines(string(data)) {
		if strings.HasPrefix(line, verb+" ") {
			calls = append(calls, strings.TrimSpace(line))
		}
	}
	return calls
}

// journalled makes a namespace for id and journals its attachment, with the configuration of now.
func (n *node) journalled(t *testing.T, id string, change func(*Attachment)) {
	configuration, err := n.Configuration()
	if err == nil {
		err = n.Options.Namespaces.(*namespace.Dir).Create(id)
	}
	must(t, err)
	a := Attachment{ID: id, Network: configuration.Name, Config: configuration.Bytes, Args: map[string]string{"IgnoreUnknown": "1", "K8S_POD_NAME": id}}
	if change != nil {
		change(&a)
	}
	_, err = n.enroll(a)
	must(t, err)
}

// attached journals id and attaches it.
func (n *node) attached(t *testing.T, id string) *Result {
	n.journalled(t, id, nil)
	return n.attach(t, id)
}

func (n *node) attach(t *testing.T, id string) *Result {
	result, err := n.try(t.Context(), id)
	must(t, err)
	n.given[id] = result.Addresses
	return result
}

// try runs ADD for a journalled attachment.
func (n *node) try(ctx context.Context, id string) (*Result, error) {
	said, err := n.add(ctx, n.find(id), n.Options.Namespaces.Path(id))
	if err != nil {
		return nil, err
	}
	return &Result{Addresses: addresses(said), Raw: said.Raw()}, nil
}

func (n *node) detach(t *testing.T, id string) {
	must(t, n.Detach(t.Context(), id, n.NamespacePath(id)))
}

func newNamespaces(t *testing.T, mark string) *namespace.Dir {
	directory := filepath.Join(t.TempDir(), "namespaces")
	namespaces, err := namespace.Open(directory, mark)
	must(t, err)
	t.Cleanup(func() {
		ids, err := namespaces.IDs()
		for _, id := range ids {
			err = errors.Join(err, namespaces.Remove(id))
		}
		harness.Check(t, errors.Join(err, unix.Unmount(directory, unix.MNT_DETACH)))
	})
	return namespaces
}

func put(t *testing.T, path, text string) { must(t, os.WriteFile(path, []byte(text), 0o600)) }

func absolute(t *testing.T, path string) string {
	result, err := filepath.Abs(path)
	must(t, err)
	return result
}

func marshal(t *testing.T, value any) string {
	data, err := json.Marshal(value)
	must(t, err)
	return string(data)
}
