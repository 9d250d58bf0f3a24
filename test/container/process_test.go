package container

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

// The command is the image's, or the request's. The environment is passed on byte by byte;
// what is not UTF-8 no JSON carries.
//
// cri: ContainerConfig.args ContainerConfig.command ContainerConfig.working_dir
func TestEnvironmentAndDirectory(t *testing.T) {
	p := newPod(t)
	p.wantExit(p.run("image", "", command()), 9, "Error")
	p.wantExit(p.run("args", "", command(), func(c *runtimeapi.ContainerConfig) { c.Args = []string{"-c", "exit 6"} }), 6, "Error")
	same(t, "environment", p.output("app", `echo "$FROM $A $HOSTNAME"; pwd`, env("FROM", "request"), env("A", "x=y z")), "request x=y z web\n/srv")
	cwd := func(c *runtimeapi.ContainerConfig) { c.WorkingDir = "/made/for/it" }
	same(t, "working directory", p.output("cwd", "pwd", cwd), "/made/for/it")
	const odd = " =\n\t\x01\x7f\"\\$(x)<>&ä\u2028😀 "
	id := p.run("utf-8", forever, env("BEFORE", "1"), env("ODD", odd), env("AFTER", "ä"))
	for variable, want := range harness.Sorted(map[string]string{"BEFORE": "1", "ODD": odd, "AFTER": "ä", "FROM": "image"}) {
		same(t, variable, environmentOf(t, p.info(id).PID)[variable], want)
	}
	answer, err := p.tryExec(id, 0, "sh", "-c", `printf %s "$ODD"`)
	check(t, err)
	same(t, "of an exec", string(answer.Stdout), odd)
	missing := filepath.Join(p.Dir, "missing")
	for impossible, named := range harness.Sorted(map[string]string{"a\x00b": "config.envs[0].value", "latin \xe4": "ODD"}) {
		wantRefused(t, p.createErr(shell("impossible", "true", env("ODD", impossible), mounted(missing, "/missing"))), named)
	}
	_, err = os.Lstat(missing)
	expect(t, errors.Is(err, os.ErrNotExist), "a source was made for a container that was refused: %v", err)
}

func env(name, value string) option {
	return func(c *runtimeapi.ContainerConfig) {
		c.Envs = append(c.Envs, &runtimeapi.KeyValue{Key: name, Value: []byte(value)})
	}
}

// environmentOf waits for what the kernel shows a moment after the start alone: between
// two programs a process has no environment.
func environmentOf(t *testing.T, pid int) map[string]string {
	var data []byte
	harness.Eventually(t, "the process has an environment", func() bool {
		data = harness.Read(t, fmt.Sprintf("/proc/%d/environ", pid))
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
	named := func(name string) option {
		return secure(func(s *runtimeapi.LinuxContainerSecurityContext) { s.RunAsUsername = name })
	}
	for want, change := range harness.Sorted(map[string]option{
		"0 0 0": func(*runtimeapi.ContainerConfig) {},
		"4321 765 765 888": all(asUser(4321), secure(func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.RunAsGroup, s.SupplementalGroups = &runtimeapi.Int64Value{Value: 765}, []int64{888}
		})),
		"1000 1000 1000 2000": named("web"),
		"1000 1000 1000": all(named("web"), secure(func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.SupplementalGroupsPolicy = runtimeapi.SupplementalGroupsPolicy_Strict
		})),
	}) {
		same(t, "ids", p.output("user-"+strings.ReplaceAll(want, " ", "-"), "echo $(id -u; id -g; id -G)", change), want)
	}
	u := p.status(p.create(shell("status", "true", named("web")))).User.GetLinux()
	expect(t, u.GetUid() == 1000 && u.GetGid() == 1000 && len(u.GetSupplementalGroups()) != 0, "status: %v", u)
	wantCode(t, p.createErr(shell("unknown", "true", named("nobody-knows"))), codes.InvalidArgument)
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
	p.exec(id, "echo written > /rw/new && echo written > /absent/new && ! touch /ro/new 2>/dev/null")
	for _, file := range []string{filepath.Join(dir, "new"), filepath.Join(absent, "new")} {
		same(t, file, string(harness.Read(t, file)), "written\n")
	}
	same(t, "mounts in the status", len(p.status(id).Mounts), 6)
}

func secure(change func(*runtimeapi.LinuxContainerSecurityContext)) option {
	return func(c *runtimeapi.ContainerConfig) { change(c.Linux.SecurityContext) }
}

// cri: LinuxContainerSecurityContext.privileged LinuxSandboxSecurityContext.privileged
func TestPrivileged(t *testing.T) {
	p := newPod(t, privilegedPod)
	id := p.run("app", forever, privileged)
	harness.Want(t, p.info(id).Privileged && !p.info(p.run("plain", forever)).Privileged, "the verbose status does not say which container is privileged")
	p.exec(id, "mount -t tmpfs x /tmp && umount /tmp && test -e /dev/kmsg && test -w /sys && unshare -U true")
	same(t, "seccomp", harness.ProcStatus(t, p.info(id).PID, "Seccomp"), "0")
	// Who mounts the node's /dev shares memory with its pod, not with the node.
	p.exec(id, "touch /dev/shm/of-the-pod")
	p.exec(p.run("devices", forever, privileged, mounted("/dev", "/dev")), "test -e /dev/shm/of-the-pod")
}

// cri: LinuxContainerSecurityContext.no_new_privs LinuxContainerSecurityContext.seccomp LinuxContainerSecurityContext.seccomp_profile_path
func TestSeccompAndNoNewPrivs(t *testing.T) {
	p := newPod(t)
	profile := filepath.Join(t.TempDir(), "profile.json")
	check(t, os.WriteFile(profile, []byte(`{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["mkdir","mkdirat"],"action":"SCMP_ACT_ERRNO"}]}`), 0o600))
	for name, c := range harness.Sorted(map[string]struct {
		change                func(*runtimeapi.LinuxContainerSecurityContext)
		seccomp, noNew, holds string
	}{
		"free": {func(*runtimeapi.LinuxContainerSecurityContext) {}, "0", "0", "unshare -U true"},
		"confined": {func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.Seccomp, s.NoNewPrivs = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault}, true
		}, "2", "1", "! unshare -U true"},
		// The older form is still sent.
		"by-path": {func(s *runtimeapi.LinuxContainerSecurityContext) { s.SeccompProfilePath = "localhost/" + profile }, "2", "0", "! mkdir /tmp/x && touch /tmp/y"},
	}) {
		id := p.run(name, forever, secure(c.change))
		same(t, name+": seccomp", harness.ProcStatus(t, p.info(id).PID, "Seccomp"), c.seccomp)
		same(t, name+": no_new_privs", harness.ProcStatus(t, p.info(id).PID, "NoNewPrivs"), c.noNew)
		p.exec(id, c.holds)
	}
}

// cri: ContainerConfig.devices Device.container_path Device.host_path Device.permissions
func TestDevices(t *testing.T) {
	p := newPod(t)
	id := p.run("app", forever, func(c *runtimeapi.ContainerConfig) {
		c.Devices = []*runtimeapi.Device{{HostPath: "/dev/kmsg", ContainerPath: "/dev/given", Permissions: "w"}}
	})
	p.exec(id, "(: > /dev/given) && ! (: < /dev/given)")
	// One that is made by hand is closed: the cgroup does not have it.
	p.exec(id, "mknod /tmp/loop c 10 237 && ! (: > /tmp/loop)")
}

func pidMode(mode runtimeapi.NamespaceMode, target string) option {
	return func(c *runtimeapi.ContainerConfig) {
		c.Linux.SecurityContext.NamespaceOptions = &runtimeapi.NamespaceOption{Pid: mode, TargetId: target}
	}
}

func podPID(mode runtimeapi.NamespaceMode) func(*runtimeapi.PodSandboxConfig) {
	return func(c *runtimeapi.PodSandboxConfig) { c.Linux.SecurityContext.NamespaceOptions.Pid = mode }
}

func nodeIPC(c *runtimeapi.PodSandboxConfig) {
	c.Linux.SecurityContext.NamespaceOptions.Ipc = runtimeapi.NamespaceMode_NODE
}

// wantNamespaces fails the test unless two processes share the namespaces, or do not.
func wantNamespaces(t *testing.T, one, other int, shared bool, kinds ...string) {
	for _, kind := range kinds {
		what := fmt.Sprintf("processes %d and %d share the %s namespace", one, other, kind)
		same(t, what, namespace(t, one, kind) == namespace(t, other, kind), shared)
	}
}

// cri: ExecSyncRequest.timeout NamespaceOption.target_id
func TestPIDModes(t *testing.T) {
	n := newNode(t)
	apart, together, node := runPod(t, n, "apart"), runPod(t, n, "together", podPID(runtimeapi.NamespaceMode_POD)), runPod(t, n, "node", podPID(runtimeapi.NamespaceMode_NODE))
	first := apart.run("first", forever)
	same(t, "CONTAINER: process 1", apart.exec(first, "readlink /proc/1/exe"), "/bin/busybox")
	target := apart.run("target", forever, pidMode(runtimeapi.NamespaceMode_TARGET, first))
	wantNamespaces(t, apart.info(first).PID, apart.info(target).PID, true, "pid", "net")
	wantCode(t, apart.createErr(shell("lost", "true", pidMode(runtimeapi.NamespaceMode_TARGET, "nosuch"))), codes.NotFound)
	pod := together.run("pod", forever, pidMode(runtimeapi.NamespaceMode_POD, ""))
	second := together.run("second", forever, pidMode(runtimeapi.NamespaceMode_POD, ""))
	wantNamespaces(t, together.info(pod).PID, together.info(second).PID, true, "pid")
	same(t, "POD: process 1", together.exec(pod, "cat /proc/1/comm"), "pause")
	wantNamespaces(t, node.info(node.run("host", forever, pidMode(runtimeapi.NamespaceMode_NODE, ""))).PID, os.Getpid(), true, "pid")
}

func TestP35_ExecJoinsTheContainer(t *testing.T) {
	p := newPod(t)
	id := p.run("one", forever)
	one, other := p.info(id).PID, p.info(p.run("other", forever)).PID
	wantNamespaces(t, one, other, true, "net", "ipc", "uts")
	wantNamespaces(t, one, other, false, "pid", "mnt")
	wantNamespaces(t, one, os.Getpid(), false, "net", "ipc", "uts", "pid", "mnt")
	for _, kind := range []string{"net", "ipc", "uts", "pid", "mnt", "user", "cgroup"} {
		same(t, kind, p.exec(id, "readlink /proc/self/ns/"+kind), namespace(t, one, kind))
	}
}

// tool is a mount of testdata/process.c, compiled.
func tool(t *testing.T) option {
	program := filepath.Join(t.TempDir(), "process")
	out, err := exec.Command("gcc", "-O1", "-static", "-pthread", "-o", program, "testdata/process.c").CombinedOutput()
	harness.Need(t, err == nil, "gcc: %v: %s", err, out)
	// A pod with a user namespace walks through it.
	for dir := filepath.Dir(program); dir != filepath.Clean(os.TempDir()); dir = filepath.Dir(dir) {
		info, err := os.Stat(dir)
		check(t, err)
		check(t, os.Chmod(dir, info.Mode()|0o011))
	}
	return mounted(program, "/process")
}

func tty(c *runtimeapi.ContainerConfig) { c.Stdin, c.Tty = true, true }

// eachWay runs a test with a mount of the program, in a pod whose processes are launched, and in a pod of a user
// namespace, whose processes a starter makes.
func eachWay(t *testing.T, test func(t *testing.T, p *pod, program option)) {
	n, program := newNode(t), tool(t)
	for name, options := range harness.Sorted(map[string][]nodetest.PodOption{"launched": nil, "starter": {nodetest.UserNamespace}}) {
		t.Run(name, func(t *testing.T) { test(t, runPod(t, n, name, options...), program) })
	}
}

// A program may ask for a signal when its parent ends, as a first process and in an exec, by both ways of exec.
func TestProgramsThatDieWithTheirParent(t *testing.T) {
	eachWay(t, func(t *testing.T, p *pod, program option) {
		first := p.run("first", "", program, command("/process", "die-with-parent"))
		id := p.run("app", forever, program)
		var execs sync.WaitGroup
		for range 10 {
			execs.Go(func() {
				answer, err := p.tryExec(id, 0, "/process", "die-with-parent")
				check(t, err)
				same(t, "exit code", answer.GetExitCode(), 0)
				same(t, "output", string(answer.GetStdout()), "lived\n")
			})
		}
		execs.Wait()
		p.wantExit(first, 0, "Completed")
		one := func() bool { return len(startersOf(p.Supervisors()[0])) <= 1 }
		harness.Eventually(t, "no starter but the one that waits is left", one)
	})
}

// A first process whose first thread has ended, or that executed its program in another thread, runs like any other.
func TestFirstThreadThatEnded(t *testing.T) {
	eachWay(t, func(t *testing.T, p *pod, program option) {
		for name, words := range harness.Sorted(map[string][]string{
			"another-thread":              {"/process", "thread", "/bin/sh", "-c", forever},
			"first-thread-ended":          {"/process", "first-thread-ends"},
			"first-thread-ended-and-exec": {"/process", "first-thread-ends", "/bin/sh", "-c", forever},
		}) {
			id := p.run(name, "", program, command(words...), memory(64<<20))
			p.awaitLine(id, "ready")
			same(t, name+": an exec", p.exec(id, "echo hi; hostname"), "hi\n"+p.config.Hostname)
			check(t, p.update(id, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 128 << 20}))
			same(t, name+": an exec after the update", p.exec(id, "echo hi"), "hi")
			same(t, name+": state", p.status(id).State, running)
			check(t, p.stop(id, 0))
			p.wantExit(id, 137, "Error")
		}
	})
}

// A program may close its terminal and open it again, by each of its names, alone and in a pod with one pid namespace.
func TestTerminalThatIsOpenedAgain(t *testing.T) {
	n := newNode(t)
	for name, mode := range harness.Sorted(map[string]runtimeapi.NamespaceMode{
		"own": runtimeapi.NamespaceMode_CONTAINER, "shared": runtimeapi.NamespaceMode_POD,
	}) {
		p := runPod(t, n, name, podPID(mode))
		for _, terminal := range []string{"/dev/console", "/dev/tty"} {
			const script = "exec <&- >&- 2>&-; for i in 1 2 3; do usleep 20000; echo line $i >TERMINAL; done\n" +
				"exec >TERMINAL <TERMINAL; echo end; read x; echo got $x"
			id := p.run(filepath.Base(terminal), strings.ReplaceAll(script, "TERMINAL", terminal), tty, pidMode(mode, ""))
			harness.Eventually(t, "all lines are in the log", func() bool {
				return p.stdout(id) == "line 1\r\nline 2\r\nline 3\r\nend\r\n"
			})
			check(t, p.stop(id, 0))
			p.wantExit(id, 137, "Error")
		}
	}
}
