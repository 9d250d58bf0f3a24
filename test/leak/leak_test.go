package leak

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/test/harness"
)

// patience is how long a test waits for what the kernel or another process does.
const patience = time.Minute

var must = harness.Check

func take(t *testing.T, scope Scope) Snapshot {
	t.Helper()
	s, err := Take(t.Context(), scope)
	must(t, err)
	return s
}

// life is that of one leak: how it is made and undone.
type life struct {
	kind       Kind
	name       string // part of the leak's
	scope      Scope
	make, undo func() error
}

// expect checks a whole life: clean, found once made, clean once undone.
func (l life) expect(t *testing.T) {
	t.Helper()
	before := take(t, l.scope)
	if leaks := Diff(before, take(t, l.scope)); len(leaks) != 0 {
		t.Fatalf("clean state has leaks: %v", leaks)
	}
	if standing := Diff(Snapshot{}, before); slices.Contains([]Kind{Address, Result, Rule}, l.kind) && len(standing) > 0 {
		t.Errorf("what is shared, or another's, counts: %v", standing)
	}
	must(t, l.make())
	leaks := Diff(before, take(t, l.scope))
	harness.Need(t, len(leaks) == 1, "want one leak, %s %s, got %v", l.kind, l.name, leaks)
	harness.Want(t, leaks[0].Kind == l.kind, "want one leak, %s %s, got %v", l.kind, l.name, leaks)
	harness.Want(t, strings.Contains(leaks[0].Name, l.name), "want one leak, %s %s, got %v", l.kind, l.name, leaks)
	harness.Want(t, leaks[0].Count == 1, "want one leak, %s %s, got %v", l.kind, l.name, leaks)
	if lost := Diff(take(t, l.scope), before); len(lost) != 0 {
		t.Errorf("something was lost: %v", lost)
	}
	must(t, l.undo())
	settles(t, "after undo", patience, before, l.scope, 0)
}

// settles waits for the limit at most, and fails the test unless so many leaks are left then.
func settles(t *testing.T, when string, limit time.Duration, before Snapshot, scope Scope, want int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	if leaks, err := Settle(ctx, before, scope); err != nil || len(leaks) != want {
		t.Errorf("%s: want %d leaks, got %v, error %v", when, want, leaks, err)
	}
}

func ofFile(kind Kind, scope Scope, path string) life {
	return life{kind, filepath.Base(path), scope, func() error { return os.WriteFile(path, nil, 0o600) }, func() error { return os.Remove(path) }}
}

func ofCommands(kind Kind, scope Scope, name string, add, remove []string) life {
	run := func(words []string) func() error { return exec.Command(words[0], words[1:]...).Run }
	return life{kind, name, scope, run(add), run(remove)}
}

// Each kind of thing is found, whatever plugins share and others have beside it.
func TestEachKindIsFound(t *testing.T) {
	// The thread is never unlocked, so it ends with the test and the namespace with it.
	runtime.LockOSThread()
	must(t, unix.Unshare(unix.CLONE_NEWNET))
	dir := t.TempDir()
	dirs := []string{dir}
	for _, name := range []string{"lock", "last_reserved_ip.0", "other-c0ffee-eth0"} {
		must(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
	}
	for _, words := range []string{"iptables -t nat -N CNI-HOSTPORT-DNAT", "nft add table inet another"} {
		must(t, exec.Command("/bin/sh", "-c", words).Run())
	}
	const chain, table = "CNI-DN-b115d0f60c93e46bfc23d", "minicri-cni-1-masquerade"
	link := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "leak0"}}
	program := filepath.Join(t.TempDir(), fmt.Sprintf("lk%d", os.Getpid())) // a name that nothing else has
	must(t, exec.Command("cp", "/bin/sleep", program).Run())
	sleep := exec.Command(program, "600")
	var fd int
	lives := []life{
		ofFile(NetnsFile, Scope{NetnsDirs: dirs}, dir+"/cni-1"),
		ofFile(Address, Scope{AddressDirs: dirs}, dir+"/10.88.0.7"),
		ofFile(Address, Scope{AddressDirs: dirs}, dir+"/fd00::7"),
		ofFile(Result, Scope{ResultDirs: dirs, Networks: []string{"mine"}}, dir+"/mine-c0ffee-eth0"),
		ofFile(File, Scope{StateDirs: dirs}, dir+"/c0ffee"),
		{Mount, dir, Scope{Mounts: dirs}, func() error { return unix.Mount("leak-test", dir, "tmpfs", 0, "") }, func() error { return unix.Unmount(dir, 0) }},
		{Link, "leak0", Scope{Links: true}, func() error { return netlink.LinkAdd(link) }, func() error { return netlink.LinkDel(link) }},
		ofCommands(Rule, Scope{Rules: true}, chain, []string{"iptables", "-t", "nat", "-N", chain}, []string{"iptables", "-t", "nat", "-X", chain}),
		ofCommands(Rule, Scope{Tables: true}, table, []string{"nft", "add", "table", "inet", table}, []string{"nft", "delete", "table", "inet", table}),
		{Process, filepath.Base(program), Scope{Executables: []string{filepath.Base(program)}}, sleep.Start, func() error {
			err := sleep.Process.Kill()
			_ = sleep.Wait() // its error is the kill
			return err
		}},
	}
	for name, open := range map[string]func() (int, error){
		"/leak": func() (int, error) {
			return unix.Open(filepath.Join(t.TempDir(), "leak"), unix.O_CREAT|unix.O_CLOEXEC, 0o600)
		},
		"socket": func() (int, error) { return unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0) },
	} {
		makeIt := func() (err error) { fd, err = open(); return err }
		lives = append(lives, life{Descriptor, name, Scope{Descriptors: []int{os.Getpid()}}, makeIt, func() error { return unix.Close(fd) }})
	}
	// One cgroup in one hierarchy is a leak, not only one in all of them.
	hierarchies, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	must(t, err)
	if len(hierarchies) == 0 {
		t.Fatal("no cgroup hierarchy is mounted")
	}
	parent := fmt.Sprintf("/minicri-leak-%d", time.Now().UnixNano())
	for _, hierarchy := range hierarchies {
		path := filepath.Join(hierarchy.Mountpoint, parent)
		must(t, os.Mkdir(path, 0o755))
		defer os.Remove(path)
		lives = append(lives, life{
			Cgroup, parent + "/pod",
			Scope{Cgroups: []string{parent}},
			func() error { return os.Mkdir(path+"/pod", 0o755) },
			func() error { return os.Remove(path + "/pod") },
		})
	}
	for _, l := range lives {
		l.expect(t)
	}
}

// A namespace is found as long as a process is in it. Other work on the machine has namespaces that come and
// go, so only this one is looked for.
func TestNamespaceOfProcess(t *testing.T) {
	for _, kind := range []string{"net", "user"} {
		cmd := exec.Command("unshare", "--"+kind, "sleep", "600")
		must(t, cmd.Start())
		harness.Eventually(t, "unshare becomes sleep", func() bool { return command(cmd.Process.Pid) == "sleep" })
		namespace, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", cmd.Process.Pid, kind))
		must(t, err)
		found := func() bool {
			return slices.ContainsFunc(Diff(Snapshot{}, take(t, Scope{Namespaces: []string{kind}})), func(l Leak) bool { return l.Name == namespace })
		}
		harness.Eventually(t, "it is found", found)
		must(t, cmd.Process.Kill())
		_ = cmd.Wait() // its error is the kill
		harness.Eventually(t, "it is gone", func() bool { return !found() })
	}
}

// What cannot be looked at must not look clean. What is left at the deadline is a leak, what goes before it is none.
func TestSettle(t *testing.T) {
	dir := t.TempDir()
	path, scope := filepath.Join(dir, "late"), Scope{StateDirs: []string{dir}}
	before := take(t, scope)
	must(t, os.WriteFile(path, nil, 0o600))
	if _, err := Take(t.Context(), Scope{NetnsDirs: []string{path}}); !errors.Is(err, unix.ENOTDIR) {
		t.Errorf("a file was taken for an empty directory: %v", err)
	}
	settles(t, "at the deadline", 3*settleInterval, before, scope, 1)
	defer time.AfterFunc(3*settleInterval, func() { os.Remove(path) }).Stop()
	settles(t, "before the deadline", patience, before, scope, 0)
}
