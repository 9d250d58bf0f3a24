package e2e

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

func sysctls(pairs ...string) harness.PodOption {
	return func(c *runtimeapi.PodSandboxConfig) {
		c.Linux.Sysctls = map[string]string{}
		for i := 0; i < len(pairs); i += 2 {
			c.Linux.Sysctls[pairs[i]] = pairs[i+1]
		}
	}
}

// Those of an interface exist only once ADD has made it.
func TestSysctlsOfTheNetwork(t *testing.T) {
	n := newNode(t)
	pid := pausePID(t, n, n.RunPod(n.PodConfig("web", sysctls("net.core.somaxconn", "777", "net/ipv4/tcp_syncookies", "0",
		"net.ipv4.conf.eth0.arp_announce", "2", "net/ipv4/conf/eth0/arp_ignore", "1"))))
	for name, want := range map[string]string{
		"net.core.somaxconn": "777", "net.ipv4.tcp_syncookies": "0", "net.ipv4.conf.eth0.arp_announce": "2", "net.ipv4.conf.eth0.arp_ignore": "1",
		// No one asked for these, every runtime sets them.
		"net.ipv4.ip_unprivileged_port_start": "0", "net.ipv4.ping_group_range": "0\t2147483647",
	} {
		if got := netSysctl(t, pid, name); got != want {
			t.Errorf("%s: want %q, got %q", name, want, got)
		}
	}
	if own, _ := os.ReadFile("/proc/sys/net/core/somaxconn"); string(own) == "777\n" {
		t.Error("the node's somaxconn was set")
	}
	if _, err := run(t, n, n.PodConfig("refused", sysctls("net.ipv4.conf.eth0.arp_announce", "no number"))); err == nil || len(list(t, n, nil)) != 1 {
		t.Errorf("a value that the kernel refuses: %v", err)
	}
}

func TestSysctlsOfIPC(t *testing.T) {
	n := newNode(t)
	pid := pausePID(t, n, n.RunPod(n.PodConfig("web", sysctls("kernel.shm_rmid_forced", "1", "kernel.msgmax", "12345", "fs.mqueue.msg_max", "33"))))
	var got [3]string
	inside(t, pid, map[string]int{"ipc": unix.CLONE_NEWIPC}, func() error {
		for i, path := range []string{"kernel/shm_rmid_forced", "kernel/msgmax", "fs/mqueue/msg_max"} {
			data, err := os.ReadFile("/proc/sys/" + path)
			if err != nil {
				return err
			}
			got[i] = string(data)
		}
		return nil
	})
	if got != [3]string{"1\n", "12345\n", "33\n"} {
		t.Errorf("got %q", got)
	}
}
