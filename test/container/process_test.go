package container

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// cri: ContainerConfig.args ContainerConfig.command
func TestCommandOfTheImage(t *testing.T) {
	p := newPod(t)
	p.wantExit(p.run("image", "", command()), 9, "Error")
	p.wantExit(p.run("args", "", command(), func(c *runtimeapi.ContainerConfig) { c.Args = []string{"-c", "exit 6"} }), 6, "Error")
}

// The environment is passed on byte by byte. What is not UTF-8 no JSON carries.
//
// cri: ContainerConfig.working_dir
func TestEnvironmentAndDirectory(t *testing.T) {
	p := newPod(t)
	same(t, "environment", p.output("app", `echo "$FROM $A $HOSTNAME"; pwd`, env("FROM", "request"), env("A", "x=y z")), "request x=y z web\n/srv")
	cwd := func(c *runtimeapi.ContainerConfig) { c.WorkingDir = "/made/for/it" }
	same(t, "working directory", p.output("cwd", "pwd", cwd), "/made/for/it")
	const odd = " =\n\t\x01\x7f\"\\$(x)<>&ä\u2028😀 "
	id := p.run("utf-8", forever, env("BEFORE", "1"), env("ODD", odd), env("AFTER", "ä"))
	for variable, want := range map[string]string{"BEFORE": "1", "ODD": odd, "AFTER": "ä", "FROM": "image"} {
		same(t, variable, environmentOf(t, p.info(id).PID)[variable], want)
	}
	answer, err := p.tryExec(id, 0, "sh", "-c", `printf %s "$ODD"`)
	check(t, err)
	same(t, "of an exec", string(answer.Stdout), odd)
	for impossible, named := range map[string]string{"a\x00b": "config.envs[0].value", "latin \xe4": "ODD"} {
		_, err = p.tryCreate(shell("impossible", "true", env("ODD", impossible)))
		wantRefused(t, err, named)
	}
}

func env(name, value string) option {
	return func(c *runtimeapi.ContainerConfig) {
		c.Envs = append(c.Envs, &runtimeapi.KeyValue{Key: name, Value: []byte(value)})
	}
}

// environmentOf waits for what the kernel shows a moment after the start alone: between
// two programs a process has no environment.
func environmentOf(t *testing.T, pid int) map[string]string {
	t.Helper()
	var data []byte
	eventually(t, "the process has an environment", func() bool {
		var err error
		data, err = os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		check(t, err)
		return len(data) > 0
	})
	values := make(map[string]string)
	for pair := range strings.SplitSeq(string(data), "\x00") {
		name, value, _ := strings.Cut(pair, "=")
		values[name] = value
	}
	return values
}

// cri: ContainerStatus.user ContainerUser.linux LinuxContainerSecurityContext.run_as_username
// cri: LinuxContainerSecurityContext.supplemental_groups_policy LinuxContainerUser.gid
// cri: LinuxContainerUser.supplemental_groups LinuxContainerUser.uid
func TestUsers(t *testing.T) {
	p := newPod(t)
	byName := secure(func(s *runtimeapi.LinuxContainerSecurityContext) { s.RunAsUsername = "web" })
	for want, change := range map[string]option{
		"0 0 0": func(*runtimeapi.ContainerConfig) {},
		"4321 765 765 888": all(asUser(4321), secure(func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.RunAsGroup, s.SupplementalGroups = &runtimeapi.Int64Value{Value: 765}, []int64{888}
		})),
		"1000 1000 1000 2000": byName,
		"1000 1000 1000": all(byName, secure(func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.SupplementalGroupsPolicy = runtimeapi.SupplementalGroupsPolicy_Strict
		})),
	} {
		same(t, "ids", p.output("user-"+strings.ReplaceAll(want, " ", "-"), "echo $(id -u; id -g; id -G)", change), want)
	}
	id := p.create(shell("status", "true", byName))
	if u := p.status(id).User.GetLinux(); u.GetUid() != 1000 || u.GetGid() != 1000 || len(u.GetSupplementalGroups()) == 0 {
		t.Errorf("status: %v", u)
	}
	_, err := p.tryCreate(shell("unknown", "true", secure(func(s *runtimeapi.LinuxContainerSecurityContext) { s.RunAsUsername = "nobody-knows" })))
	wantCode(t, err, codes.InvalidArgument)
}

func mounted(host, container string, change ...func(*runtimeapi.Mount)) option {
	return func(c *runtimeapi.ContainerConfig) {
		mount := &runtimeapi.Mount{HostPath: host, ContainerPath: container}
		for _, each := range change {
			each(mount)
		}
		c.Mounts = append(c.Mounts, mount)
	}
}

func readonly(m *runtimeapi.Mount) { m.Readonly = true }

func readonlyBelow(m *runtimeapi.Mount) {
	m.Readonly, m.RecursiveReadOnly, m.Propagation = true, true, runtimeapi.MountPropagation_PROPAGATION_PRIVATE
}

// cri: ContainerStatus.mounts Mount.readonly
func TestMounts(t *testing.T) {
	p := newPod(t)
	dir := filepath.Join(p.Dir, "volume")
	check(t, os.MkdirAll(filepath.Join(dir, "sub"), 0o755))
	check(t, os.WriteFile(filepath.Join(dir, "file"), []byte("of the node\n"), 0o644))
	absent := filepath.Join(p.Dir, "made", "by", "it")
	id := p.run("app", forever, mounted(dir, "/rw"), mounted(dir, "/ro", readonly), mounted(filepath.Join(dir, "file"), "/etc/one"), mounted(absent, "/absent"), mounted(filepath.Join(dir, "sub"), "/rw/file.d"), mounted(filepath.Join(dir, "file"), "/rw/../../etc/./two"))
	same(t, "file", p.exec(id, "cat /rw/file /ro/file /etc/one /etc/two"), strings.TrimSpace(strings.Repeat("of the node\n", 4)))
	p.exec(id, "echo written > /rw/new; echo written > /absent/new; ! touch /ro/new 2>/dev/null")
	for _, file := range []string{filepath.Join(dir, "new"), filepath.Join(absent, "new")} {
		data, err := os.ReadFile(file)
		check(t, err)
		same(t, file, string(data), "written\n")
	}
	if n := len(p.status(id).Mounts); n != 6 {
		t.Errorf("status has %d mounts", n)
	}
}

// cri: ContainerConfig.linux LinuxContainerConfig.security_context Mount.propagation
func TestMountPropagation(t *testing.T) {
	p := newPod(t)
	dir := filepath.Join(p.Dir, "shared")
	check(t, os.MkdirAll(filepath.Join(dir, "in"), 0o755))
	check(t, unix.Mount("shared", dir, "tmpfs", 0, ""))
	check(t, unix.Mount("", dir, "", unix.MS_SHARED, ""))
	for _, sub := range []string{"in", "out"} {
		check(t, os.Mkdir(filepath.Join(dir, sub), 0o755))
	}
	private := p.run("private", forever, mounted(dir, "/v"))
	propagated := func(how runtimeapi.MountPropagation) option {
		return mounted(dir, "/v", func(m *runtimeapi.Mount) { m.Propagation = how })
	}
	slave := p.run("slave", forever, propagated(runtimeapi.MountPropagation_PROPAGATION_HOST_TO_CONTAINER))
	check(t, unix.Mount("in", filepath.Join(dir, "in"), "tmpfs", 0, ""))
	has := func(id string) string { return p.exec(id, "grep -c ' /v/in ' /proc/self/mountinfo || true") }
	same(t, "private sees the mount", has(private), "0")
	same(t, "slave sees the mount", has(slave), "1")
	p2 := runPod(t, p.Node, "privileged", privilegedPod)
	both := p2.run("both", forever, privileged, propagated(runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL))
	p2.exec(both, "mount -t tmpfs out /v/out")
	for _, id := range []string{private, slave, both} {
		check(t, p.remove(id))
	}
	for _, mounted := range []string{filepath.Join(dir, "in"), filepath.Join(dir, "out"), dir} {
		if err := unix.Unmount(mounted, 0); err != nil {
			t.Errorf("%s is not mounted on the node: %v", mounted, err)
		}
	}
}
