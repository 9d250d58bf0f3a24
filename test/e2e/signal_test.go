package e2e

import (
	"os"
	"path/filepath"
	"strconv"
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

// Neither SIGHUP nor SIGUSR1 ends a daemon that starts, from its first line in the log on.
func TestSignalsDoNotEndTheDaemon(t *testing.T) {
	n := newNode(t)
	id := n.RunPod(n.PodConfig("web"))
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
	err := n.TryStart()
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
	lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range lines {
		line, _ := os.ReadFile(path)
		if words := strings.Split(string(line), "\x00"); filepath.Base(words[0]) == "minicri" && strings.Contains(string(line), "\x00"+socket+"\x00") {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			return pid
		}
	}
	return 1 << 30
}
