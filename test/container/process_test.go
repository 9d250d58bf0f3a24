package container

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// cri: ContainerConfig.args ContainerConfig.command
func TestCommandOfTheImage(t *testing.T) {
	p := newPod(t)
	image := shell("image", "")
	image.Command = nil
	id := p.create(image)
	check(t, p.start(id))
	p.wantExit(id, 9, "Error")
	args := shell("args", "")
	args.Command, args.Args = nil, []string{"-c", "exit 6"}
	id = p.create(args)
	check(t, p.start(id))
	p.wantExit(id, 6, "Error")
}

// cri: ContainerConfig.working_dir
func TestEnvironmentAndDirectory(t *testing.T) {
	p := newPod(t)
	got := p.output("app", `echo "$FROM $A $HOSTNAME"; pwd`, func(c *runtimeapi.ContainerConfig) {
		c.Envs = []*runtimeapi.KeyValue{{Key: "FROM", Value: []byte("request")}, {Key: "A", Value: []byte("x=y z")}}
	})
	same(t, "environment", got, "request x=y z web\n/srv")
	got = p.output("cwd", "pwd", func(c *runtimeapi.ContainerConfig) { c.WorkingDir = "/made/for/it" })
	same(t, "working directory", got, "/made/for/it")
}

// The environment is passed on byte by byte. What is not UTF-8 no JSON carries.
func TestBytesOfTheEnvironment(t *testing.T) {
	p := newPod(t)
	const odd = " =\n\t\x01\x7f\"\\$(x)<>&ä\u2028😀 "
	id := p.run("utf-8", forever, env("BEFORE", "1"), env("ODD", odd), env("AFTER", "ä"))
	for variable, want := range map[string]string{"BEFORE": "1", "ODD": odd, "AFTER": "ä", "FROM": "image"} {
		same(t, variable, environmentOf(t, p.info(id).PID)[variable], want)
	}
	answer, err := p.tryExec(id, 0, "sh", "-c", `printf %s "$ODD"`)
	check(t, err)
	same(t, "of an exec", string(answer.Stdout), odd)
	_, err = p.tryCreate(shell("impossible", "true", env("ODD", "a\x00b")))
	wantCode(t, err, codes.InvalidArgument)
	_, err = p.tryCreate(shell("impossible", "true", env("ODD", "latin \xe4")))
	wantCode(t, err, codes.InvalidArgument)
	if !strings.Contains(err.Error(), "ODD") {
		t.Errorf("the error does not name the variable: %v", err)
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
	user := func(change func(*runtimeapi.LinuxContainerSecurityContext)) option {
		return func(c *runtimeapi.ContainerConfig) { change(c.Linux.SecurityContext) }
	}
	const ids = "id -u; id -g; id -G"
	words := func(text string) string { return strings.Join(strings.Fields(text), " ") }
	same(t, "root", words(p.output("root", ids)), "0 0 0")
	same(t, "uid", words(p.output("uid", ids, user(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.RunAsUser, s.RunAsGroup = &runtimeapi.Int64Value{Value: 4321}, &runtimeapi.Int64Value{Value: 765}
		s.SupplementalGroups = []int64{888}
	}))), "4321 765 765 888")
	byName := user(func(s *runtimeapi.LinuxContainerSecurityContext) { s.RunAsUsername = "web" })
	same(t, "name", words(p.output("name", ids, byName)), "1000 1000 1000 2000")
	strict := user(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.RunAsUsername, s.SupplementalGroupsPolicy = "web", runtimeapi.SupplementalGroupsPolicy_Strict
	})
	same(t, "strict", words(p.output("strict", ids, strict)), "1000 1000 1000")
	id := p.create(shell("status", "true", byName))
	if u := p.status(id).User.GetLinux(); u.GetUid() != 1000 || u.GetGid() != 1000 || len(u.GetSupplementalGroups()) == 0 {
		t.Errorf("status: %v", u)
	}
	_, err := p.tryCreate(shell("unknown", "true", user(func(s *runtimeapi.LinuxContainerSecurityContext) { s.RunAsUsername = "nobody-knows" })))
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

func propagation(p runtimeapi.MountPropagation) func(*runtimeapi.Mount) {
	return func(m *runtimeapi.Mount) { m.Propagation = p }
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
	slave := p.run("slave", forever, mounted(dir, "/v", propagation(runtimeapi.MountPropagation_PROPAGATION_HOST_TO_CONTAINER)))
	check(t, unix.Mount("in", filepath.Join(dir, "in"), "tmpfs", 0, ""))
	has := func(id string) string { return p.exec(id, "grep -c ' /v/in ' /proc/self/mountinfo || true") }
	same(t, "private sees the mount", has(private), "0")
	same(t, "slave sees the mount", has(slave), "1")
	privileged := func(c *runtimeapi.ContainerConfig) { c.Linux.SecurityContext.Privileged = true }
	p2 := runPod(t, p.Node, "privileged", func(c *runtimeapi.PodSandboxConfig) { c.Linux.SecurityContext.Privileged = true })
	both := p2.run("both", forever, privileged, mounted(dir, "/v", propagation(runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL)))
	p2.exec(both, "mount -t tmpfs out /v/out")
	is, err := mountinfo.Mounted(filepath.Join(dir, "out"))
	check(t, err)
	if !is {
		t.Error("the mount of a bidirectional container did not reach the node")
	}
	for _, id := range []string{private, slave, both} {
		check(t, p.remove(id))
	}
	check(t, unix.Unmount(filepath.Join(dir, "in"), 0))
	if is {
		check(t, unix.Unmount(filepath.Join(dir, "out"), 0))
	}
	check(t, unix.Unmount(dir, 0))
}
