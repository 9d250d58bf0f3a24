package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// A daemon that was started from a shell with umask 077 makes what containers of
// any user can read, and pods with user namespaces.
func TestUmaskOfTheShellChangesNothing(t *testing.T) {
	n := newNode(t)
	files := func(id string) (modes string) {
		for _, name := range []string{"", "hostname", "hosts", "resolv.conf", "shm"} {
			info, err := os.Stat(filepath.Join(n.State, "sandboxes", id, name))
			check(t, err)
			modes += " " + name + "=" + info.Mode().String()
		}
		return modes
	}
	before := files(n.RunPod(n.PodConfig("before")))
	n.Stop()
	mask := unix.Umask(0o077)
	err := n.TryStart()
	unix.Umask(mask)
	check(t, err)
	if after := files(n.RunPod(n.PodConfig("after"))); after != before {
		t.Errorf("with umask 077:%s\nwithout:       %s", after, before)
	}
	if !ready(t, n, n.RunPod(n.PodConfig("users", userNamespace(&runtimeapi.IDMapping{HostId: 200000, Length: 65536})))) {
		t.Error("a pod with a user namespace is not ready")
	}
}

// SIGHUP reloads what can be reloaded and names what cannot; neither it nor SIGUSR1
// ever ends the daemon, however many come.
func TestSignalsDoNotEndTheDaemon(t *testing.T) {
	n := newNode(t)
	id := n.RunPod(n.PodConfig("web"))
	pid := n.PID()
	for range 50 {
		check(t, unix.Kill(pid, unix.SIGHUP))
		check(t, unix.Kill(pid, unix.SIGUSR1))
	}
	file := filepath.Join(n.Dir, "config.toml")
	text, err := os.ReadFile(file)
	check(t, err)
	check(t, os.WriteFile(file, append([]byte("pids_limit = 123\n"), text...), 0o600))
	check(t, unix.Kill(pid, unix.SIGHUP))
	eventually(t, "the log names what needs a restart", patience, func() bool { return strings.Contains(n.Log(), "pids_limit") })
	// What cannot be read is logged, and changes nothing.
	check(t, os.WriteFile(file, []byte("nonsense"), 0o600))
	check(t, unix.Kill(pid, unix.SIGHUP))
	eventually(t, "the broken file is logged", patience, func() bool {
		return strings.Contains(n.Log(), "config.toml:1") || strings.Contains(n.Log(), "nonsense")
	})
	check(t, os.WriteFile(file, text, 0o600))
	if n.PID() != pid || !n.Running() || !ready(t, n, id) {
		t.Error("the daemon has ended, or the pod has")
	}
	// Also while it starts, from its first line in the log on.
	n.Kill()
	said := len(n.Log())
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
			}
			log, _ := os.ReadFile(filepath.Join(n.Dir, "daemon.log"))
			if len(log) > said {
				_ = unix.Kill(daemonOf(n.Socket), unix.SIGHUP) // it may not be found yet
				_ = unix.Kill(daemonOf(n.Socket), unix.SIGUSR1)
			}
		}
	}()
	err = n.TryStart()
	close(stop)
	<-stopped
	check(t, err)
	if !ready(t, n, id) {
		t.Error("the pod is not ready")
	}
}

// daemonOf is the process that was started with the socket, one that no signal
// reaches if there is none.
func daemonOf(socket string) int {
	const none = 1 << 30
	lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range lines {
		line, _ := os.ReadFile(path)
		if words := strings.Split(string(line), "\x00"); filepath.Base(words[0]) == "minicri" && strings.Contains(string(line), "\x00"+socket+"\x00") {
			var pid int
			for _, digit := range filepath.Base(filepath.Dir(path)) {
				pid = 10*pid + int(digit-'0')
			}
			return pid
		}
	}
	return none
}
