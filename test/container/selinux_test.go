//go:build vm && selinux

package container

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/selinux/go-selinux"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

// These tests need SELinux that enforces a policy which knows containers: make test-um-selinux. They ask the
// kernel, by the labels of processes and files and by what it denies.

func domain(t *testing.T, pid int) selinux.Context {
	text, err := selinux.PidLabel(pid)
	check(t, err)
	context, err := selinux.NewContext(text)
	check(t, err)
	return context
}

func fileLabel(t *testing.T, path string) string {
	text, err := selinux.FileLabel(path)
	check(t, err)
	return text
}

func enforcing(t *testing.T) {
	harness.Need(t, selinux.EnforceMode() == selinux.Enforcing, "SELinux does not enforce here")
}

// The containers of a pod have its level, other pods have others, and what a container has open and mounted has its
// label: the program reads and writes all of it.
//
// cri: LinuxContainerSecurityContext.selinux_options LinuxSandboxSecurityContext.selinux_options
func TestSELinuxOfAPod(t *testing.T) {
	enforcing(t)
	n := newNode(t)
	p, other := runPod(t, n, "web"), runPod(t, n, "other")
	pause := domain(t, p.pausePID())
	same(t, "type of pause", pause["type"], "container_t")
	id := p.run("app", "echo out; echo err >&2; "+forever)
	for name, pid := range harness.Sorted(map[string]int{"app": p.info(id).PID, "second": p.info(p.run("second", forever)).PID}) {
		same(t, "type of "+name, domain(t, pid)["type"], "container_t")
		same(t, "level of "+name, domain(t, pid)["level"], pause["level"])
	}
	theirs := domain(t, other.pausePID())["level"]
	expect(t, strings.Contains(theirs, ":") && theirs != pause["level"], "levels %q and %q of two pods", pause["level"], theirs)
	label := "system_u:object_r:container_file_t:" + pause["level"]
	root := fmt.Sprintf("/proc/%d/root", p.info(id).PID)
	for _, path := range []string{"/bin", "/dev/shm", "/etc/hosts", "/etc/resolv.conf", "/etc/hostname"} {
		same(t, "label of "+path, fileLabel(t, root+path), label)
	}
	p.exec(id, "echo x >/tmp/x && echo x >/dev/shm/x && cat /etc/hosts /etc/resolv.conf /etc/hostname && cat /proc/self/attr/current")
	p.awaitLine(id, "out")
}

// An image is readable as a volume, also one of a single layer, which has no file
// system of its own to be mounted with a label.
//
// cri: Mount.image
func TestSELinuxOfImageVolumes(t *testing.T) {
	enforcing(t)
	n := newNode(t)
	importData(n) // two layers
	p := runPod(t, n, "web")
	single := imageMount("/single", func(m *runtimeapi.Mount) { m.Image.Image = nodetest.BusyboxImage })
	id := p.run("app", forever, imageMount("/data"), single)
	same(t, "content", p.exec(id, "cat /data/readme && test -s /single/bin/busybox"), "read me")
	label := "system_u:object_r:container_file_t:" + domain(t, p.pausePID())["level"]
	root := fmt.Sprintf("/proc/%d/root", p.info(id).PID)
	for _, path := range []string{"/data/readme", "/single/bin/busybox"} {
		same(t, "label of "+path, fileLabel(t, root+path), label)
	}
	p.exec(id, "for f in /data/new /single/new; do (echo x > $f) 2>/dev/null && exit 1; done; true")
}

// What one pod is given is not another's, whatever the modes of the files are.
//
// cri: Mount.selinux_relabel
func TestSELinuxKeepsPodsApart(t *testing.T) {
	enforcing(t)
	n := newNode(t)
	relabel := func(m *runtimeapi.Mount) { m.SelinuxRelabel = true }
	dir := filepath.Join(n.Dir, "data")
	check(t, os.Mkdir(dir, 0o777))
	check(t, os.Chmod(dir, 0o777))
	p, other := runPod(t, n, "web"), runPod(t, n, "other")
	p.exec(p.run("app", forever, mounted(dir, "/data", relabel)), "echo secret >/data/secret && chmod 666 /data/secret && cat /data/secret")
	answer, err := other.tryExec(other.run("app", forever, mounted(dir, "/data")), 0, "cat", "/data/secret")
	check(t, err)
	expect(t, answer.ExitCode != 0, "another pod reads %q", answer.Stdout)
	same(t, "label", fileLabel(t, filepath.Join(dir, "secret")), "system_u:object_r:container_file_t:"+domain(t, p.pausePID())["level"])
	wantError(t, p.createErr(shell("etc", forever, mounted("/etc", "/data", relabel))), "/etc")
}

// A node directory that was not given to containers is closed to them, and open to privileged ones.
func TestSELinuxOfPrivileged(t *testing.T) {
	enforcing(t)
	p := newPod(t, privilegedPod)
	root := mounted("/root", "/node")
	same(t, "type", domain(t, p.info(p.run("privileged", forever, root, privileged)).PID)["type"], "spc_t")
	answer, err := p.tryExec(p.run("plain", forever, root), 0, "sh", "-c", "echo x >/node/x")
	check(t, err)
	expect(t, answer.ExitCode != 0, "a container writes into /root of the node")
}

// A level that the pod asks for is used.
//
// cri: SELinuxOption.level SELinuxOption.role SELinuxOption.type SELinuxOption.user
func TestSELinuxOptions(t *testing.T) {
	enforcing(t)
	want := &runtimeapi.SELinuxOption{User: "system_u", Role: "system_r", Type: "container_t", Level: "s0:c7,c9"}
	p := newPod(t, func(c *runtimeapi.PodSandboxConfig) { c.Linux.SecurityContext.SelinuxOptions = want })
	same(t, "pause", domain(t, p.pausePID()).Get(), "system_u:system_r:container_t:s0:c7,c9")
	id := p.run("app", forever)
	same(t, "container", domain(t, p.info(id).PID).Get(), "system_u:system_r:container_t:s0:c7,c9")
	id = p.run("own", forever, secure(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.SelinuxOptions = &runtimeapi.SELinuxOption{Level: "s0:c1,c2"}
	}))
	same(t, "container with a level", domain(t, p.info(id).PID)["level"], "s0:c1,c2")
}
