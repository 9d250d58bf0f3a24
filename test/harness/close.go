package harness

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/test/leak"
)

const (
	// settleTime is what the kernel may take for zombies, veth pairs and
	// namespaces: some inits reap every two seconds only.
	settleTime = time.Minute

	// resultDir is libcni's, and it has no other.
	resultDir = "/var/lib/cni/results"
)

// executables are all that a node starts: the daemon, its shim, libcontainer's
// init, pause, and the plugins that it may lose.
var executables = []string{
	"minicri", "minicri-shim", "runc:[1:CHILD]", "runc:[2:INIT]", "pause",
	"bridge", "host-local", "portmap", "loopback",
}

// machineScope is what there is of the node with and without its daemon.
func (n *Node) machineScope() leak.Scope {
	scope := leak.Scope{
		NetnsDirs:   []string{n.Netns},
		Mounts:      []string{n.Dir},
		Links:       true,
		Rules:       true,
		Tables:      true,
		AddressDirs: []string{n.Addresses},
		ResultDirs:  []string{resultDir},
		Networks:    []string{n.Network},
		Cgroups:     []string{n.CgroupParent},
	}
	if n.options.parallel {
		scope.Marks = []string{n.Network}
		return scope
	}
	scope.Namespaces = []string{"net", "user"}
	scope.Executables = slices.Clone(executables)
	return scope
}

// idleScope is machineScope, and what only a daemon that runs has.
func (n *Node) idleScope() leak.Scope {
	scope := n.machineScope()
	scope.Tables = false // the daemon's, as long as it lives
	// The supervisor that serves now is not the one of before if a test has
	// killed that; it goes with the daemon.
	scope.Except = append([]int{n.daemon.pid()}, n.Supervisors()...)
	scope.Executables = slices.DeleteFunc(scope.Executables, func(name string) bool { return name == "minicri" })
	scope.Descriptors = []int{n.daemon.pid()}
	scope.KeptDescriptors = []string{cgroupRoot}
	scope.StateDirs = []string{n.Root, n.State}
	// The links of plugins are those of the plugins that are installed:
	// checkPluginLinks looks at them.
	scope.KeptDirs = []string{filepath.Join(n.Root, "lives")}
	return scope
}

// look takes a snapshot in the node's network namespace.
func (n *Node) look(scope leak.Scope) leak.Snapshot {
	n.t.Helper()
	var seen leak.Snapshot
	n.must("looking", n.inNetns(func() (err error) {
		seen, err = leak.Take(context.Background(), scope)
		return err
	}))
	return seen
}

// closeNodes takes the nodes of one test down together and says what they
// left. It continues after an error: every node ends.
func closeNodes(t testing.TB, nodes []*Node) {
	for _, n := range nodes {
		n.report("removing the pods that the test left", n.removeAllPods())
		n.report("removing the cgroups of pods", n.removePodCgroups())
		n.report("looking for units of systemd", n.checkUnits())
	}
	for _, n := range nodes {
		if n.Running() {
			n.expectNothingMore(context.Background(), "idle, compared with before the first pod", n.idle, n.idleScope())
			n.report("stopping the daemon", n.stop())
		}
	}
	for _, n := range nodes {
		n.report("unmounting the directories of namespaces", n.unmountPinDirs())
		n.expectNothingMore(context.Background(), "stopped, compared with before the daemon's start", n.empty, n.machineScope())
	}
	for _, n := range nodes {
		if t.Failed() {
			t.Logf("node %s: its daemon's log:\n%s", n.Network, n.Log())
		}
	}
}

// removeAllPods needs a daemon: a test may end with it stopped or killed.
func (n *Node) removeAllPods() error {
	if n.daemon == nil {
		return nil // it never started, and the test failed for that
	}
	if !n.Running() {
		if err := n.start(); err != nil {
			return err
		}
	}
	return n.removePods()
}

// cgroupRoot is opened once by the library that reads cgroups, with the first
// pod, and kept.
const cgroupRoot = "/sys/fs/cgroup"

func (n *Node) expectNothingMore(ctx context.Context, when string, before leak.Snapshot, scope leak.Scope) {
	ctx, cancel := context.WithTimeout(ctx, settleTime)
	defer cancel()
	n.report("looking for leaks", n.inNetns(func() error {
		leaks, err := leak.Settle(ctx, before, scope)
		for _, l := range leaks {
			n.t.Errorf("node %s: %s: left behind: %s", n.Network, when, l)
		}
		return err
	}))
	n.expectNothingLost(when, before, scope)
}

// othersMayEnd are kinds of which less is no loss: other namespaces and
// processes in sight end when they like, and a daemon that was started again
// has not opened yet what an idle one keeps.
var othersMayEnd = []leak.Kind{leak.Namespace, leak.Process, leak.Descriptor}

// mayEnd reports whether the end of a thing is no loss: so may end what the
// image store keeps, which it collects when it likes, and a run of plugins that
// is for no pod (STATUS, GC).
func (n *Node) mayEnd(l leak.Leak) bool {
	return slices.Contains(othersMayEnd, l.Kind) || strings.HasPrefix(l.Name, filepath.Join(n.Root, "image")+"/") ||
		strings.HasPrefix(filepath.Base(l.Name), "minicri-cni-")
}

// expectNothingLost finds what was taken down though it was no pod's.
func (n *Node) expectNothingLost(when string, before leak.Snapshot, scope leak.Scope) {
	n.report("looking for losses", n.inNetns(func() error {
		after, err := leak.Take(context.Background(), scope)
		if err != nil {
			return err
		}
		for _, l := range leak.Diff(after, before) {
			if !n.mayEnd(l) {
				n.t.Errorf("node %s: %s: lost: %s", n.Network, when, l)
			}
		}
		return nil
	}))
}

// unmountPinDirs undoes what a daemon does once for all pods: it makes the
// directories of namespaces mounts of their own, so that no other mount
// namespace copies a pod's.
func (n *Node) unmountPinDirs() error {
	var errs []error
	for _, dir := range []string{n.Netns, filepath.Join(n.State, "userns")} {
		mounted, err := mountinfo.Mounted(dir)
		if mounted {
			err = unix.Unmount(dir, unix.MNT_DETACH)
		}
		errs = append(errs, ignoreMissing(err))
	}
	return errors.Join(errs...)
}

// removeAll takes away by force what is left of the node after the checks.
func (n *Node) removeAll() {
	n.hangUp()
	if n.Running() {
		n.report("killing the daemon", n.daemon.kill())
	}
	n.report("removing cgroups", n.removeCgroups())
	n.report("unmounting", n.unmountAll())
	n.report("removing results", n.removeResults())
	n.report("removing files", os.RemoveAll(n.Dir))
	if n.netns != nil {
		n.netns.Close()
	}
}

func (n *Node) unmountAll() error {
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(n.Dir))
	if err != nil {
		return err
	}
	var errs []error
	for _, m := range slices.Backward(mounts) {
		if err := unix.Unmount(m.Mountpoint, unix.MNT_DETACH); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", m.Mountpoint, err))
		}
	}
	return errors.Join(errs...)
}

func (n *Node) removeResults() error {
	left, err := filepath.Glob(filepath.Join(resultDir, n.Network+"-*"))
	for _, file := range left {
		err = errors.Join(err, os.Remove(file))
	}
	return err
}

// report fails the test without ending it.
func (n *Node) report(what string, err error) {
	if err != nil {
		n.t.Errorf("node %s: %s: %v", n.Network, what, err)
	}
}
