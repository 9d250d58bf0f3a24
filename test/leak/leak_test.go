package leak

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	if os.Getuid() != 0 {
		fmt.Fprintln(os.Stderr, "these tests need root: they make namespaces, mounts, links and cgroups")
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// patience is how long a test waits for what the kernel or another process does.
const patience = time.Minute

// eventually polls until the condition holds, and fails the test if it does not.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !holds(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}

// expectLeak checks a whole life: clean, found once made, clean once undone.
// name has to be part of the only leak's name.
func expectLeak(t *testing.T, scope Scope, kind Kind, name string, makeIt func(), undo func()) {
	t.Helper()
	before := take(t, scope)
	if leaks := Diff(before, take(t, scope)); len(leaks) != 0 {
		t.Fatalf("clean state has leaks: %v", leaks)
	}

	makeIt()
	leaks := Diff(before, take(t, scope))
	if len(leaks) != 1 || leaks[0].Kind != kind || !strings.Contains(leaks[0].Name, name) || leaks[0].Count != 1 {
		t.Errorf("want one leak, %s %s, got %v", kind, name, leaks)
	}
	if lost := Diff(take(t, scope), before); len(lost) != 0 {
		t.Errorf("something was lost: %v", lost)
	}

	undo()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	leaks, err := Settle(ctx, before, scope)
	if err != nil || len(leaks) != 0 {
		t.Errorf("left after undo: %v, error %v", leaks, err)
	}
}

func take(t *testing.T, scope Scope) Snapshot {
	t.Helper()
	s, err := Take(t.Context(), scope)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// inNetns moves the test into a network namespace of its own. The thread is
// never unlocked, so it ends with the test and the namespace with it.
func inNetns(t *testing.T) {
	t.Helper()
	runtime.LockOSThread()
	must(t, unix.Unshare(unix.CLONE_NEWNET))
	lo, err := netlink.LinkByName("lo")
	must(t, err)
	must(t, netlink.LinkSetUp(lo))
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func run(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, out)
	}
}

func writeFile(t *testing.T, path string) {
	t.Helper()
	must(t, os.WriteFile(path, nil, 0o600))
}

func TestNetnsFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "cni-1")
	expectLeak(t, Scope{NetnsDirs: []string{dir}}, NetnsFile, "cni-1",
		func() { writeFile(t, path) },
		func() { must(t, os.Remove(path)) })
}

func TestMount(t *testing.T) {
	dir := t.TempDir()
	expectLeak(t, Scope{Mounts: []string{dir}}, Mount, dir,
		func() { must(t, unix.Mount("leak-test", dir, "tmpfs", 0, "")) },
		func() { must(t, unix.Unmount(dir, 0)) })
}

func TestLink(t *testing.T) {
	inNetns(t)
	link := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "leak0"}}
	expectLeak(t, Scope{Links: true}, Link, "leak0",
		func() { must(t, netlink.LinkAdd(link)) },
		func() { must(t, netlink.LinkDel(link)) })
}

func TestAddress(t *testing.T) {
	dir := t.TempDir()
	scope := Scope{AddressDirs: []string{dir}}
	// host-local writes the address of IPv6 with colons, and keeps these two.
	writeFile(t, filepath.Join(dir, "lock"))
	for _, address := range []string{"10.88.0.7", "fd00::7"} {
		path := filepath.Join(dir, address)
		expectLeak(t, scope, Address, address,
			func() { writeFile(t, path) },
			func() { must(t, os.Remove(path)) })
	}
	before := take(t, scope)
	writeFile(t, filepath.Join(dir, "last_reserved_ip.0"))
	if leaks := Diff(before, take(t, scope)); len(leaks) != 0 {
		t.Errorf("host-local's own file counts as a leak: %v", leaks)
	}
}

func TestResult(t *testing.T) {
	dir := t.TempDir()
	scope := Scope{ResultDirs: []string{dir}, Networks: []string{"mine"}}
	path := filepath.Join(dir, "mine-c0ffee-eth0")
	expectLeak(t, scope, Result, "c0ffee",
		func() { writeFile(t, path) },
		func() { must(t, os.Remove(path)) })

	writeFile(t, filepath.Join(dir, "other-c0ffee-eth0"))
	if n := take(t, scope).Count(Result); n != 0 {
		t.Errorf("%d results of another network count", n)
	}
	if n := take(t, Scope{ResultDirs: []string{dir}}).Count(Result); n != 1 {
		t.Errorf("want 1 result of all networks, got %d", n)
	}
}

func TestFile(t *testing.T) {
	dir := t.TempDir()
	must(t, os.Mkdir(filepath.Join(dir, "pods"), 0o700))
	path := filepath.Join(dir, "pods", "c0ffee")
	expectLeak(t, Scope{StateDirs: []string{dir}}, File, path,
		func() { must(t, os.Mkdir(path, 0o700)) },
		func() { must(t, os.Remove(path)) })
}

// One cgroup in one hierarchy is a leak, not only one in all of them.
func TestCgroup(t *testing.T) {
	hierarchies, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	must(t, err)
	if len(hierarchies) == 0 {
		t.Fatal("no cgroup hierarchy is mounted")
	}
	parent := fmt.Sprintf("/minicri-leak-%d", os.Getpid())
	for _, hierarchy := range hierarchies {
		path := filepath.Join(hierarchy.Mountpoint, parent)
		must(t, os.Mkdir(path, 0o755))
		child := filepath.Join(path, "pod")
		expectLeak(t, Scope{Cgroups: []string{parent}}, Cgroup, parent+"/pod",
			func() { must(t, os.Mkdir(child, 0o755)) },
			func() { must(t, os.Remove(child)) })
		must(t, os.Remove(path))
	}
}

// What cannot be looked at must not look clean.
func TestUnreadablePlaceIsAnError(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	writeFile(t, file)
	if _, err := Take(t.Context(), Scope{NetnsDirs: []string{file}}); err == nil {
		t.Error("a file was taken for an empty directory")
	}
}

func TestSettleWaits(t *testing.T) {
	dir := t.TempDir()
	scope := Scope{StateDirs: []string{dir}}
	before := take(t, scope)
	path := filepath.Join(dir, "late")
	writeFile(t, path)

	short, cancel := context.WithTimeout(t.Context(), 3*settleInterval)
	defer cancel()
	leaks, err := Settle(short, before, scope)
	if err != nil || len(leaks) != 1 {
		t.Errorf("want the leak at the deadline, got %v, error %v", leaks, err)
	}

	removed := time.AfterFunc(3*settleInterval, func() { os.Remove(path) })
	defer removed.Stop()
	long, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	leaks, err = Settle(long, before, scope)
	if err != nil || len(leaks) != 0 {
		t.Errorf("want nothing left, got %v, error %v", leaks, err)
	}
}
