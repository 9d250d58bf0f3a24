package nodetest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/leak"
)

// settleTime is what the kernel may take for zombies, veth pairs and namespaces: some inits reap every two
// seconds only.
const settleTime = 5 * time.Minute

// resultDir is libcni's, and it has no other.
const resultDir = "/var/lib/cni/results"

// executables are all that a node starts: the daemon, its shim, libcontainer's init, pause, and the plugins
// that it may lose.
var executables = []string{
	"minicri", "minicri-shim", "runc:[1:CHILD]", "runc:[2:INIT]", "pause", "bridge", "host-local", "portmap", "loopback",
}

// machineScope is what there is of the node with and without its daemon.
func (n *Node) machineScope() leak.Scope {
	scope := leak.Scope{
		NetnsDirs: []string{n.Netns}, Mounts: []string{n.Dir}, Cgroups: []string{n.CgroupParent}, Links: true, Rules: true,
		Tables: true, AddressDirs: []string{n.Addresses}, ResultDirs: []string{resultDir}, Networks: []string{n.Network},
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
	// The supervisor that serves now is not the one of before if a test has killed that; it goes with the daemon.
	scope.Except = append([]int{n.daemon.pid()}, n.Supervisors()...)
	scope.Executables = slices.DeleteFunc(scope.Executables, func(name string) bool { return name == "minicri" })
	scope.Descriptors = []int{n.daemon.pid()}
	scope.KeptDescriptors = []string{"/sys/fs/cgroup"} // opened once by the library that reads cgroups, and kept
	scope.StateDirs = []string{n.Root, n.State}
	// The links of plugins are those of the plugins that are installed: checkPluginLinks looks at them.
	scope.KeptDirs = []string{filepath.Join(n.Root, "lives")}
	return scope
}

// look takes a snapshot in the node's network namespace.
func (n *Node) look(scope leak.Scope) (seen leak.Snapshot) {
	n.must("looking", n.inNetns(func() (err error) {
		seen, err = leak.Take(context.Background(), scope)
		return err
	}))
	return seen
}

// Look takes a snapshot of all that the node and its daemon, which must run, hold now: for tests that compare
// more often than at their end.
func (n *Node) Look() leak.Snapshot { return n.look(n.idleScope()) }

// Differences waits until the node holds again what it held before, no longer than the kernel may take, and
// returns what then is left behind or lost, one line for each. The daemon must run.
func (n *Node) Differences(before leak.Snapshot) []string {
	return n.differences(before, n.idleScope(), settleTime)
}

func (n *Node) differences(before leak.Snapshot, scope leak.Scope, limit time.Duration) (lines []string) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	err := n.inNetns(func() error {
		leaks, err := leak.Settle(ctx, before, scope)
		for _, l := range leaks {
			lines = append(lines, "left behind: "+l.String())
		}
		if err != nil {
			return err
		}
		after, err := leak.Take(context.Background(), scope)
		if err != nil {
			return err
		}
		for _, l := range leak.Diff(after, before) {
			if !n.mayEnd(l) {
				lines = append(lines, "lost: "+l.String())
			}
		}
		return nil
	})
	if err != nil {
		lines = append(lines, fmt.Sprint("looking for leaks: ", err))
	}
	return lines
}

// close takes the node down and says what it left. It continues after an error, to the end.
func (n *Node) close() {
	n.report("removing the pods that the test left", n.removeAllPods())
	n.report("removing the cgroups of pods", n.removePodCgroups())
	n.report("looking for units of systemd", n.checkUnits())
	if n.Running() {
		n.expectSame("idle, compared with before the first pod", n.idle, n.idleScope(), settleTime)
		n.report("stopping the daemon", n.stop())
	}
	n.report("unmounting the directories of namespaces", n.unmountPinDirs())
	n.expectSame("stopped, compared with before the daemon's start", n.empty, n.machineScope(), settleTime)
	if n.t.Failed() {
		n.t.Logf("node %s: its daemon's log:\n%s", n.Network, n.Log())
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
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	list, err := n.Runtime.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
	if err != nil {
		return fmt.Errorf("ListPodSandbox: %w", err)
	}
	for _, pod := range list.Items {
		if err := n.removePod(pod.Id); err != nil {
			return err
		}
	}
	return nil
}

func (n *Node) expectSame(when string, before leak.Snapshot, scope leak.Scope, limit time.Duration) {
	for _, line := range n.differences(before, scope, limit) {
		n.t.Errorf("node %s: %s: %s", n.Network, when, line)
	}
}

// mayEnd reports whether the end of a thing is no loss: other namespaces and processes in sight end when they
// like, a daemon that was started again has not opened yet what an idle one keeps, the image store collects
// when it likes, and a run of plugins may be for no pod (STATUS, GC).
func (n *Node) mayEnd(l leak.Leak) bool {
	return slices.Contains([]leak.Kind{leak.Namespace, leak.Process, leak.Descriptor}, l.Kind) || strings.HasPrefix(l.Name, filepath.Join(n.Root, "image")+"/") ||
		strings.HasPrefix(filepath.Base(l.Name), "minicri-cni-")
}

// unmountPinDirs undoes what a daemon does once for all pods: it makes the directories of namespaces mounts
// of their own, so that no other mount namespace copies a pod's.
func (n *Node) unmountPinDirs() error {
	var errs error
	for _, dir := range []string{n.Netns, filepath.Join(n.State, "userns")} {
		mounted, err := mountinfo.Mounted(dir)
		if mounted {
			err = unix.Unmount(dir, unix.MNT_DETACH)
		}
		errs = errors.Join(errs, harness.IgnoreMissing(err))
	}
	return errs
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
	for _, m := range slices.Backward(mounts) {
		if unmountErr := unix.Unmount(m.Mountpoint, unix.MNT_DETACH); unmountErr != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", m.Mountpoint, unmountErr))
		}
	}
	return err
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
	harness.Want(n.t, err == nil, "node %s: %s: %v", n.Network, what, err)
}
