package stream

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// An exec is in the container, in each way there is, and never on the host.
//
// cri: LinuxContainerSecurityContext.run_as_group LinuxContainerSecurityContext.run_as_user
// cri: LinuxContainerSecurityContext.supplemental_groups
func TestExecJoinsTheContainer(t *testing.T) {
	p := newPod(t, forever, func(c *runtimeapi.ContainerConfig) {
		c.Linux.SecurityContext = &runtimeapi.LinuxContainerSecurityContext{
			RunAsUser:          &runtimeapi.Int64Value{Value: 1000},
			RunAsGroup:         &runtimeapi.Int64Value{Value: 1000},
			SupplementalGroups: []int64{3000},
			NoNewPrivs:         true,
			Capabilities:       &runtimeapi.Capability{DropCapabilities: []string{"ALL"}, AddCapabilities: []string{"NET_BIND_SERVICE"}},
			Seccomp:            &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault},
		}
	})
	first := p.process("while true")
	for name, client := range clients {
		in, typed := io.Pipe()
		request := shell("echo here; read x")
		request.Stdin = true
		var out safe
		ended := make(chan error, 1)
		go func() {
			ended <- client(t, p.execURL(request)).StreamWithContext(limited(t), remotecommand.StreamOptions{Stdin: in, Stdout: &out, Stderr: io.Discard})
		}()
		eventually(t, "the exec runs", func() bool { return out.String() == "here\n" })
		p.sameAs(name, first, p.process("read x"))
		fmt.Fprintln(typed, "go on")
		typed.Close()
		check(t, <-ended)
	}
}

// process is the host's id of a process of the container, by what its command
// line has. It may be a moment between a start and the program.
func (p *pod) process(has string) (found int) {
	p.t.Helper()
	eventually(p.t, "the container runs "+has, func() bool {
		for _, pid := range pids(p.t) {
			cgroup, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
			line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
			if bytes.Contains(cgroup, []byte(p.container)) && strings.Contains(string(line), has) {
				found = pid
				return true
			}
		}
		return false
	})
	return found
}

// sameAs compares what the kernel says of two processes.
func (p *pod) sameAs(name string, first, exec int) {
	p.t.Helper()
	for _, namespace := range []string{"cgroup", "ipc", "mnt", "net", "pid", "user", "uts"} {
		link := func(pid any) string {
			target, err := os.Readlink(fmt.Sprintf("/proc/%v/ns/%s", pid, namespace))
			check(p.t, err)
			return target
		}
		if link(exec) != link(first) {
			p.t.Errorf("%s: namespace %s is %s, that of the container %s", name, namespace, link(exec), link(first))
		}
		if hosts := namespace == "user" || namespace == "cgroup"; !hosts && link(exec) == link("self") {
			p.t.Errorf("%s: namespace %s is the host's", name, namespace)
		}
	}
	for _, field := range []string{"Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Seccomp_filters"} {
		if of, want := harness.ProcStatus(p.t, exec, field), harness.ProcStatus(p.t, first, field); of != want || of == "" {
			p.t.Errorf("%s: %s is %q, that of the container %q", name, field, of, want)
		}
	}
	if seccomp := harness.ProcStatus(p.t, exec, "Seccomp"); seccomp != "2" {
		p.t.Errorf("%s: no filter of system calls: %q", name, seccomp)
	}
	for controller, path := range cgroupsOf(p.t, exec) {
		if of := cgroupsOf(p.t, first)[controller]; path != of && !strings.HasPrefix(path, of+"/") {
			p.t.Errorf("%s: cgroup %s of %q is not in %s", name, path, controller, of)
		}
	}
	root := func(pid int) string {
		target, err := os.Stat(filepath.Join("/proc", fmt.Sprint(pid), "root", "etc", "passwd"))
		check(p.t, err)
		return fmt.Sprint(target.Sys())
	}
	if root(first) != root(exec) {
		p.t.Errorf("%s: another root directory", name)
	}
}

// cgroupsOf are paths by controllers.
func cgroupsOf(t testing.TB, pid int) map[string]string {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	check(t, err)
	paths := map[string]string{}
	for line := range strings.Lines(string(data)) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		paths[parts[1]] = parts[2]
	}
	return paths
}
