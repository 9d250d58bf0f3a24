package crash

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

// After a reboot all sandboxes are NotReady and their addresses come back by themselves; Stop and Remove work. The
// state directory is gone with the machine, or was on a disk and is of another boot; and a daemon that is killed at
// its first start after it is followed by one that knows of it, too.
func TestProperty18_Reboot(t *testing.T) {
	for _, boot := range []struct {
		name string
		end  func(*testing.T, *node)
	}{
		{"state directory gone", func(_ *testing.T, n *node) { n.Reboot() }},
		{"state directory kept", func(t *testing.T, n *node) {
			harness.Check(t, os.WriteFile(filepath.Join(n.State, "boot-id"), []byte("another"), 0o600))
		}},
		{"half made beside", func(t *testing.T, n *node) {
			harness.Check(t, os.RemoveAll(filepath.Join(n.State, "facts")))
			harness.Check(t, os.WriteFile(filepath.Join(n.State, "boot-id"), []byte("another"), 0o600))
		}},
		{"killed in the first start", func(t *testing.T, n *node) {
			n.Reboot()
			n.Arm(t, "rename facts kill")
			harness.Need(t, n.TryStart() != nil, "the daemon was not killed where it writes facts")
			n.Disarm(t)
		}},
	} {
		t.Run(boot.name, func(t *testing.T) {
			n := newNode(t)
			were := n.runEachKind(t)
			n.PowerOff()
			boot.end(t, n)
			n.Start()
			n.wantAddressesBack(t)
			// The reboot is long ago to the daemons that come next.
			for range 2 {
				n.wantNotReady(t, were)
				n.Crash()
			}
			n.wantRebooted(t, were)
		})
	}
}

func (n *node) runEachKind(t *testing.T) (pods []*runtimeapi.PodSandboxStatus) {
	for name, option := range harness.Sorted(map[string]nodetest.PodOption{"own": nodetest.HostPort(8080, 80), "userns": nodetest.UserNamespace, "host": nodetest.HostNetwork()}) {
		pods = append(pods, n.status(t, n.RunPod(n.PodConfig(name, option))))
	}
	return pods
}

func (n *node) processes(t *testing.T) (pids []int) {
	hierarchies, err := cgroup.FindHierarchies()
	harness.Check(t, err)
	pids, err = hierarchies.Processes(n.CgroupParent)
	harness.Check(t, err)
	return pids
}

func (n *node) wantNotReady(t *testing.T, were []*runtimeapi.PodSandboxStatus) {
	same(t, "sandboxes listed", len(n.list(t)), len(were))
	for _, was := range were {
		now := n.status(t, was.Id)
		harness.Want(t, now.State == runtimeapi.PodSandboxState_SANDBOX_NOTREADY && now.Network.Ip == "" && now.CreatedAt == was.CreatedAt,
			"after the reboot: %v", now)
	}
}

func (n *node) wantAddressesBack(t *testing.T) {
	harness.Eventually(t, "the addresses are freed without any call", func() bool { return len(n.addressesOut(t)) == 0 })
}

func (n *node) addressesOut(t *testing.T) []string { return harness.Glob(t, n.Addresses, "10.*") }

func (n *node) wantRebooted(t *testing.T, were []*runtimeapi.PodSandboxStatus) {
	n.wantNotReady(t, were)
	n.wantAddressesBack(t)
	for _, was := range were {
		n.RemovePod(was.Id)
	}
	n.fillNetwork()
}

// The start removes what carries our mark and has no record (P1), and touches nothing else, be it in our directories.
func TestProperty1_OrphansAreSweptAndForeignThingsStay(t *testing.T) {
	n := newNode(t)
	n.runWitness(t)
	mark := strings.TrimSuffix(filepath.Base(harness.Glob(t, n.Netns, "*"+n.witness.Id)[0]), n.witness.Id)
	before := n.Look()
	n.Kill()

	// Another daemon's mark differs in the digits alone.
	foreign := n.makeThings(t, "minicri-00000000-"+strings.Repeat("cd", 32), "somebody", "cni-1234")
	orphans := n.makeThings(t, mark+strings.Repeat("cd", 32))
	n.Start()

	n.checkWitness(t)
	harness.Eventually(t, "the orphans are gone", func() bool { gone, all := orphans.gone(); return gone == all })
	gone, all := foreign.gone()
	harness.Want(t, gone == 0, "%d of %d things were taken that were not ours: %v", gone, all, foreign)
	foreign.remove(t)
	n.wantSame(t, before)
}

// things are what a test made beside what the daemon makes.
type things struct {
	namespaces, cgroups []string
	sleeper             *exec.Cmd
	ended               chan struct{}
}

// makeThings makes, for each name, a pinned network namespace and a cgroup in
// every hierarchy, and a process that is in all of the cgroups.
func (n *node) makeThings(t *testing.T, names ...string) *things {
	made := &things{sleeper: exec.Command("sleep", "600"), ended: make(chan struct{})}
	made.sleeper.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNET}
	harness.Check(t, made.sleeper.Start())
	go func() {
		_ = made.sleeper.Wait() // it is killed
		close(made.ended)
	}()
	pid := strconv.Itoa(made.sleeper.Process.Pid)
	hierarchies, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	harness.Check(t, err)
	for _, name := range names {
		file := filepath.Join(n.Netns, name)
		harness.Check(t, os.WriteFile(file, nil, 0o444))
		harness.Check(t, unix.Mount("/proc/"+pid+"/ns/net", file, "none", unix.MS_BIND, ""))
		made.namespaces = append(made.namespaces, file)
		for _, hierarchy := range hierarchies {
			dir := filepath.Join(hierarchy.Mountpoint, n.CgroupParent, name)
			harness.Check(t, os.Mkdir(dir, 0o755))
			made.cgroups = append(made.cgroups, dir)
			// A new cpuset of version 1 takes no process.
			_ = os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(pid), 0)
		}
	}
	return made
}

// gone counts what is not there any more as it was made, all what there was.
func (m *things) gone() (gone, all int) {
	for _, path := range m.namespaces {
		if mounted, _ := mountinfo.Mounted(path); !mounted {
			gone++
		}
	}
	for _, path := range m.cgroups {
		if _, err := os.Stat(path); err != nil {
			gone++
		}
	}
	select {
	case <-m.ended:
		gone++
	default:
	}
	return gone, len(m.namespaces) + len(m.cgroups) + 1
}

func (m *things) remove(t *testing.T) {
	harness.Check(t, m.sleeper.Process.Kill())
	<-m.ended
	for _, file := range m.namespaces {
		harness.Check(t, unix.Unmount(file, unix.MNT_DETACH))
		harness.Check(t, os.Remove(file))
	}
	for _, dir := range m.cgroups {
		harness.Eventually(t, dir+" can be removed", func() bool { return os.Remove(dir) == nil })
	}
}
