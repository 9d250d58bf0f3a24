package hostile

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// attack: containers: an exec with an argument, or with arguments together, that execve does not take
// held: refused by the size, before anything is started
// field: containerd and CRI-O start the runtime's init, and say what that says
func TestExecBeyondWhatExecveTakes(t *testing.T) {
	n := harness.NewNode(t)
	n.ImportBusybox()
	id := newTenant(t, n, "large").run("c")
	for name, command := range map[string][]string{
		"one argument": {"true", strings.Repeat("x", 32*4096)}, "many arguments": append([]string{"true"}, make([]string, 1<<20)...),
	} {
		_, err := n.Runtime.ExecSync(limited(t), &runtimeapi.ExecSyncRequest{ContainerId: id, Cmd: command})
		if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "execve(2) takes") || len(err.Error()) > 1024 {
			t.Errorf("%s: %.1000v", name, err)
		}
	}
	if code, output := run(t, n, id, "true", strings.Repeat("x", 32*4096-1)); code != 0 {
		t.Errorf("the largest argument: %d: %s", code, output)
	}
}

// attack: containers: secrets as arguments of execs that fail: a program that is not there, a file that is no program, a time-out, over the streaming server too
// held: the log has the program and the number of arguments, and no argument
// field: containerd logs the whole command line
func TestArgumentsOfExecsAreNotLogged(t *testing.T) {
	const secret = "S3CRETEXEC"
	p := newTarget(t, "")
	for _, command := range [][]string{{"/no/such/program", secret}, {"/etc/hostname", secret}, {"sh", "-c", "sleep 1000", secret}} {
		_, err := p.Runtime.ExecSync(limited(t), &runtimeapi.ExecSyncRequest{ContainerId: p.container, Cmd: command, Timeout: 1})
		if err == nil {
			t.Errorf("%q did not fail", command)
		}
	}
	c := p.upgrade(p.exec("/no/such/program", "-a", secret), "v4.channel.k8s.io")
	ended := c.open(t, "error", 0, 0)
	for _, kind := range []string{"stdin", "stdout", "stderr"} {
		c.open(t, kind, 0, 0)
	}
	status, err := io.ReadAll(ended)
	check(t, err)
	if !strings.Contains(string(status), "Failure") {
		t.Errorf("the status is %s", status)
	}
	log := p.Log()
	if strings.Contains(log, secret) {
		t.Errorf("the log has an argument:\n%s", log)
	}
	for _, want := range []string{"/no/such/program", "/etc/hostname", "permission denied", "with 1 argument", "with 2 arguments", "with 3 arguments"} {
		if !strings.Contains(log, want) {
			t.Errorf("the log lacks %q:\n%s", want, log)
		}
	}
}

// attack: containers: root in a container, and in an exec of it, changes the mode of its stdin, which it has none of (chmod on /proc/self/fd/0); also by runc
// held: the node's /dev/null is as it was; the exec reads an end
// field: runc's exec has the node's /dev/null
func TestNullOfAnExecIsNotTheNodes(t *testing.T) {
	path, err := filepath.Abs("../../bin/debian/usr/sbin/runc")
	check(t, err)
	n := harness.NewNode(t, harness.Runtime("runc", path))
	n.ImportBusybox()
	before := modeOfNull(t)
	t.Cleanup(func() { check(t, os.Chmod(os.DevNull, before)) })
	for _, handler := range []string{"", "runc"} {
		pod := n.PodConfig("null" + handler)
		answer, err := n.Runtime.RunPodSandbox(limited(t), &runtimeapi.RunPodSandboxRequest{Config: pod, RuntimeHandler: handler})
		check(t, err)
		p := &tenant{n, t, pod, answer.GetPodSandboxId()}
		id := p.run("c", func(c *runtimeapi.ContainerConfig) {
			c.Command = []string{"/bin/sh", "-c", "chmod 0600 /proc/self/fd/0; touch /tmp/done; exec sleep 1000000"}
		})
		code, output := run(t, n, id, "/bin/sh", "-c", "until [ -e /tmp/done ]; do sleep 0.1; done; chmod 0600 /proc/self/fd/0; cat; echo end")
		if code != 0 || output != "end\n" {
			t.Errorf("handler %q: %d, %q", handler, code, output)
		}
		if after := modeOfNull(t); after != before {
			t.Errorf("handler %q: the mode of the node's /dev/null is %v, it was %v", handler, after, before)
		}
	}
}

func modeOfNull(t *testing.T) os.FileMode {
	t.Helper()
	info, err := os.Stat(os.DevNull)
	check(t, err)
	return info.Mode().Perm()
}
