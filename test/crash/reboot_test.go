package crash

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// After a reboot all sandboxes are NotReady and their addresses come back by
// themselves; Stop and Remove work. The state directory is gone with the
// machine, or was on a disk and is of another boot.
func TestProperty18_Reboot(t *testing.T) {
	for _, boot := range []struct {
		name string
		end  func(*testing.T, *node)
	}{
		{"state directory gone", func(t *testing.T, n *node) {
			check(t, os.RemoveAll(n.State))
			check(t, os.Mkdir(n.State, 0o755))
		}},
		{"state directory kept", func(t *testing.T, n *node) {
			check(t, os.WriteFile(filepath.Join(n.State, "boot-id"), []byte("another"), 0o600))
		}},
		{"half made beside", func(t *testing.T, n *node) {
			check(t, os.RemoveAll(filepath.Join(n.State, "facts")))
			check(t, os.WriteFile(filepath.Join(n.State, "boot-id"), []byte("another"), 0o600))
		}},
	} {
		t.Run(boot.name, func(t *testing.T) {
			n := newNode(t)
			var were []*runtimeapi.PodSandboxStatus
			for _, config := range []*runtimeapi.PodSandboxConfig{
				n.PodConfig("own", harness.HostPort(8080, 80)), n.PodConfig("userns", userNamespace), n.PodConfig("host", harness.HostNetwork()),
			} {
				were = append(were, n.status(t, n.RunPod(config)))
			}
			n.reboot(t, were)
			boot.end(t, n)
			n.Start()
			n.wantAddressesBack(t)
			// The reboot is long ago to the daemons that come next.
			for range 2 {
				n.wantNotReady(t, were)
				n.Kill()
				n.Start()
			}
			n.wantRebooted(t, were)
		})
	}
}

// reboot ends all that a reboot ends: processes, mounts, namespaces and with
// them their links, and the node's rules.
func (n *node) reboot(t *testing.T, pods []*runtimeapi.PodSandboxStatus) {
	t.Helper()
	var pids []int
	for _, pod := range pods {
		pids = append(pids, n.pausePID(t, pod.Id))
	}
	n.Kill()
	node, supervisors := n.Supervisors()
	for _, pid := range slices.Concat(pids, node, supervisors) {
		check(t, unix.Kill(pid, unix.SIGKILL))
	}
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(n.Dir))
	check(t, err)
	for i := len(mounts) - 1; i >= 0; i-- {
		check(t, unix.Unmount(mounts[i].Mountpoint, unix.MNT_DETACH))
	}
	n.RunInNetns(func() error {
		for _, order := range []string{"-F", "-X"} {
			if text, err := exec.Command("iptables", "-t", "nat", order).CombinedOutput(); err != nil {
				return fmt.Errorf("iptables: %w: %s", err, text)
			}
		}
		return nil
	})
	check(t, os.RemoveAll(n.Netns))
	check(t, os.Mkdir(n.Netns, 0o755))
}

// A daemon that is killed at any moment of its first start after a reboot is
// followed by one that knows of it, too.
func TestProperty18_KilledInTheFirstStart(t *testing.T) {
	n := newNode(t)
	var were []*runtimeapi.PodSandboxStatus
	for _, name := range []string{"a", "b", "c"} {
		were = append(were, n.status(t, n.RunPod(n.PodConfig(name))))
	}
	n.reboot(t, were)
	check(t, os.RemoveAll(n.State))
	check(t, os.Mkdir(n.State, 0o755))
	n.arm(t, "rename facts kill")
	if err := n.TryStart(); err == nil {
		t.Fatal("the daemon was not killed where it writes facts")
	}
	n.disarm(t)
	n.Start()
	n.wantNotReady(t, were)
	n.Kill()
	n.Start()
	n.wantRebooted(t, were)
}

// wantNotReady: all are listed as they were, and NotReady.
func (n *node) wantNotReady(t *testing.T, were []*runtimeapi.PodSandboxStatus) {
	t.Helper()
	if got := len(n.list(t)); got != len(were) {
		t.Errorf("%d sandboxes are listed, want %d", got, len(were))
	}
	for _, was := range were {
		now := n.status(t, was.Id)
		if now.State != runtimeapi.PodSandboxState_SANDBOX_NOTREADY || now.Network.Ip != "" || now.CreatedAt != was.CreatedAt {
			t.Errorf("after the reboot: %v", now)
		}
	}
}

func (n *node) wantAddressesBack(t *testing.T) {
	t.Helper()
	eventually(t, "the addresses come back without anybody asking", func() bool {
		left, _ := filepath.Glob(filepath.Join(n.Addresses, "10.*"))
		return len(left) == 0
	})
}

func (n *node) wantRebooted(t *testing.T, were []*runtimeapi.PodSandboxStatus) {
	t.Helper()
	n.wantNotReady(t, were)
	n.wantAddressesBack(t)
	for _, was := range were {
		n.RemovePod(was.Id)
	}
	n.fillNetwork()
}
