package stats

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// newNamespace is a network namespace with an eth0, which a process of the test holds.
func newNamespace(t *testing.T) (path string) {
	command := exec.Command("unshare", "--net", "sh", "-c", "ip link add eth0 type bridge && ip link set eth0 up && echo && read line")
	stdin, err := command.StdinPipe()
	must(t, err)
	stdout, err := command.StdoutPipe()
	must(t, errors.Join(err, command.Start()))
	t.Cleanup(func() { _, _ = stdin.Close(), command.Wait() })
	_, err = stdout.Read(make([]byte, 1))
	must(t, err)
	return fmt.Sprintf("/proc/%d/ns/net", command.Process.Pid)
}

// cri: LinuxPodSandboxStats.network
func TestNetworkThatIsGone(t *testing.T) {
	plain := t.TempDir() + "/plain"
	must(t, os.WriteFile(plain, nil, 0o600))
	for _, path := range []string{plain, plain + "-missing"} {
		if got, err := readNetwork(path); err == nil {
			t.Errorf("%s is no namespace and has %v", path, got)
		}
		m := newMeter(t, directories(t.TempDir()))
		cgroup := makeCgroup(t, m.hierarchies, filepath.Base(path))
		pod, err := m.Pod(t.Context(), Pod{ID: "pod", Cgroups: []string{cgroup}, Netns: path})
		if err != nil || pod.GetLinux().GetCpu() == nil || pod.GetLinux().GetNetwork() != nil {
			t.Errorf("a pod without its network is %v (%v)", pod, err)
		}
	}
}
