package launch_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/moby/profiles/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/supervisor/bundle"
	"github.com/minicri/minicri/supervisor/launch"
	"github.com/minicri/minicri/supervisor/starter"
	"github.com/minicri/minicri/test/harness"
)

// execVariants are what clients, and the containers that they ask for, have.
var execVariants = map[string]func(*specs.Process){
	"as root": func(*specs.Process) {},
	"by PATH, as a user": func(p *specs.Process) {
		p.Args = []string{"pause", "with", "arguments"}
		p.User = specs.User{UID: 1234, GID: 5678, AdditionalGids: []uint32{7, 8, 100000}}
	},
	"a home in its second entry": func(p *specs.Process) { p.Env = append([]string{"HOME="}, append(p.Env, `B="x y"`, "EMPTY=")...) },
	"a directory and limits": func(p *specs.Process) {
		p.Cwd = "/work/link"
		p.Rlimits = []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: 100, Hard: 200}, {Type: "RLIMIT_CORE"}}
	},
	"capabilities": func(p *specs.Process) {
		set := []string{"CAP_CHOWN", "CAP_NET_BIND_SERVICE", "CAP_SYS_PTRACE", "CAP_BPF"}
		p.Capabilities = &specs.LinuxCapabilities{Bounding: set, Effective: set[:2], Permitted: set[:3]}
	},
	"ambient capabilities of a user": func(p *specs.Process) {
		set := []string{"CAP_NET_BIND_SERVICE"}
		p.User = specs.User{UID: 1234, GID: 5678}
		p.Capabilities = &specs.LinuxCapabilities{Bounding: set, Effective: set, Permitted: set, Inheritable: set, Ambient: set}
	},
	"privileges that it may get":    func(p *specs.Process) { p.NoNewPrivileges = false },
	"a directory only the user has": func(p *specs.Process) { p.Cwd, p.User = "/work/private", specs.User{UID: 1234, GID: 5678} },
}

// execNode is a node with a container whose image has a little more than pause.
func execNode(t *testing.T, change func(*specs.Spec)) (*node, *containerOf) {
	n := newNode(t)
	harness.Check(t, errors.Join(
		os.MkdirAll(n.rootfs+"/etc", 0o755), os.MkdirAll(n.rootfs+"/work/real", 0o755), os.MkdirAll(n.rootfs+"/bin/pause", 0o755),
		os.Mkdir(n.rootfs+"/work/private", 0o700), os.Chown(n.rootfs+"/work/private", 1234, 5678),
		os.Symlink("real", n.rootfs+"/work/link"),
		os.WriteFile(n.rootfs+"/etc/passwd", nil, 0o644),
		os.WriteFile(n.rootfs+"/text", []byte("no program"), 0o755),
	))
	return n, n.container(t, fmt.Sprint("exec", time.Now().UnixNano()), change)
}

// containerOf is a container that libcontainer has made.
type containerOf struct {
	node *node
	id   string
	spec *specs.Spec
	pid  int
	init *process.Process
}

func (n *node) container(t *testing.T, id string, change func(*specs.Spec)) *containerOf {
	c := &containerOf{node: n, id: id, spec: n.spec(id)}
	change(c.spec)
	c.pid = n.create(t, id, c.spec)
	var err error
	c.init, err = process.Find(c.pid)
	harness.Check(t, err)
	t.Cleanup(func() { _ = c.init.Close() })
	rests(t, c.pid, c.spec.Process.Args)
	return c
}

// cgroups are those of the container's first process, by controller.
func (c *containerOf) cgroups(t *testing.T) map[string]string {
	found := make(map[string]string)
	for line := range strings.Lines(read(fmt.Sprintf("/proc/%d/cgroup", c.pid))) {
		_, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
		controllers, path, _ := strings.Cut(rest, ":")
		dir := filepath.Join("/sys/fs/cgroup", strings.TrimPrefix(controllers, "name="), path)
		if _, err := os.Stat("/sys/fs/cgroup/unified"); err == nil && controllers == "" {
			dir = filepath.Join("/sys/fs/cgroup/unified", path)
		}
		if path == "/" || !strings.Contains(path, strings.TrimSuffix(c.node.parent, ".slice")) {
			continue // of a hierarchy that libcontainer leaves alone
		}
		_, err := os.Stat(dir)
		harness.Check(t, err)
		found[controllers] = dir
	}
	return found
}

func execProcess() *specs.Process {
	return &specs.Process{
		Args: []string{"/pause"}, Cwd: "/", NoNewPrivileges: true, Capabilities: &specs.LinuxCapabilities{}, OOMScoreAdj: new(100),
		Env: []string{"PATH=/nowhere:/bin:/", "HOME=/root"},
	}
}

// exec launches a process in the container.
func (c *containerOf) exec(t *testing.T, ctx context.Context, p *specs.Process, change ...func(*launch.Exec)) (*launch.Launched, error) {
	harness.Want(t, launch.CanExec(c.spec, p), "it is not launched")
	template, err := c.node.Template(c.spec)
	harness.Check(t, err)
	e := launch.Exec{Template: template, ID: c.id, Init: c.init, Process: p, Cgroups: c.cgroups(t), Streams: streams(t)}
	for _, change := range change {
		change(&e)
	}
	return c.node.Exec(ctx, e)
}

// streams are pipes without another end.
func streams(t *testing.T) (ends [3]*os.File) {
	for i := range ends {
		reader, writer, err := os.Pipe()
		harness.Check(t, err)
		t.Cleanup(func() { _ = errors.Join(reader.Close(), writer.Close()) })
		if ends[i] = writer; i == 0 {
			ends[i] = reader
		}
	}
	return ends
}

// An exec that is launched cannot be told from one that libcontainer's init became.
func TestLaunchedExecIsWhatInitBecomes(t *testing.T) {
	containers := map[string]func(*specs.Spec){
		"namespaces of its own": func(*specs.Spec) {},
		"the node's processes":  variants["the node's processes"],
		"a network, and no seccomp": func(s *specs.Spec) {
			variants["a network namespace"](s)
			s.Linux.Seccomp = nil
		},
		"the default profile": func(s *specs.Spec) { s.Linux.Seccomp = defaultProfile(t, s) },
		"a cgroup namespace": func(s *specs.Spec) {
			s.Linux.Namespaces = append(s.Linux.Namespaces, specs.LinuxNamespace{Type: specs.CgroupNamespace})
		},
	}
	for name, change := range containers {
		t.Run(name, func(t *testing.T) {
			_, c := execNode(t, change)
			for variant, change := range execVariants {
				t.Run(variant, func(t *testing.T) {
					p := execProcess()
					change(p)
					if !p.NoNewPrivileges && c.spec.Linux.Seccomp != nil && len(c.spec.Linux.Seccomp.Architectures) == 0 {
						return // that filter does not allow what drops the privileges
					}
					want := c.lookInit(t, p)
					compare(t, c.lookExec(t, p), want)
				})
			}
		})
	}
}

// defaultProfile is what the kubelet's RuntimeDefault is here.
func defaultProfile(t *testing.T, s *specs.Spec) *specs.LinuxSeccomp {
	profile, err := seccomp.GetDefaultProfile(s)
	harness.Check(t, err)
	return profile
}

// lookInit is what libcontainer's init becomes, lookExec what is launched.
func (c *containerOf) lookInit(t *testing.T, p *specs.Process) map[string]string {
	output, given := outputOf(t), streams(t)
	request := starter.Request{Verb: starter.Exec, Container: bundle.Container{ID: c.id}, Process: p, Streams: [3]bool{true, true, true}}
	pid, err := c.node.ask(request, given[0], output, given[2])
	harness.Check(t, err)
	defer func() {
		_ = syscall.Kill(pid, syscall.SIGKILL)
		gone(t, pid)
	}()
	return c.look(t, pid, p, output)
}

func (c *containerOf) lookExec(t *testing.T, p *specs.Process) map[string]string {
	output := outputOf(t)
	l, err := c.exec(t, t.Context(), p, func(e *launch.Exec) { e.Streams[1] = output })
	harness.Check(t, err)
	defer c.node.end(t, l)
	return c.look(t, l.Child.PID, p, output)
}

// outputOf is a file for the output of a process.
func outputOf(t *testing.T) *os.File {
	file, err := os.Create(filepath.Join(t.TempDir(), "output"))
	harness.Check(t, err)
	t.Cleanup(func() { _ = file.Close() })
	return file
}

func (c *containerOf) look(t *testing.T, pid int, p *specs.Process, output *os.File) map[string]string {
	rests(t, pid, p.Args)
	seen := seenOf(t, pid, c.id)
	var stat syscall.Stat_t
	harness.Check(t, syscall.Stat(output.Name(), &stat))
	seen["owner of the output"] = fmt.Sprint(stat.Uid, stat.Gid)
	return seen
}

// What cannot be started is refused, by name, and nothing of it is left.
func TestExecThatCannotBeLaunched(t *testing.T) {
	_, c := execNode(t, func(*specs.Spec) {})
	for words, change := range harness.Sorted(map[string]func(*specs.Process){
		`exec: "/no/such/program": no such file or directory`:         func(p *specs.Process) { p.Args = []string{"/no/such/program"} },
		`exec: "no-such-program": executable file not found in $PATH`: func(p *specs.Process) { p.Args = []string{"no-such-program"} },
		`exec: "/etc/passwd": permission denied`:                      func(p *specs.Process) { p.Args = []string{"/etc/passwd"} },
		`exec: "/etc": permission denied`:                             func(p *specs.Process) { p.Args = []string{"/etc"} },
		`exec: "text": exec format error`:                             func(p *specs.Process) { p.Args = []string{"text"} },
		`chdir to cwd ("/proc/self/fd/3")`:                            func(p *specs.Process) { p.Cwd = "/proc/self/fd/3" },
		`chdir to cwd ("/proc/1/root")`:                               func(p *specs.Process) { p.Cwd = "/proc/1/root" },
		"set RLIMIT_CORE":                                             func(p *specs.Process) { p.Rlimits = []specs.POSIXRlimit{{Type: "RLIMIT_CORE", Soft: 2, Hard: 1}} },
		`chdir to cwd ("/no/such/directory") set in config.json failed: no such file or directory`: func(p *specs.Process) { p.Cwd = "/no/such/directory" },
	}) {
		p := execProcess()
		change(p)
		_, err := c.exec(t, t.Context(), p)
		harness.Want(t, strings.Contains(fmt.Sprint(err), words) && errdefs.IsFailedPrecondition(err), "want %s: %v", words, err)
	}
	nothingLeft(t, c.pid)
}

func noFilter(s *specs.Spec) { s.Linux.Seccomp = nil }

// attack: information leaks: a debug container (TARGET) with SYS_PTRACE takes the socket of each launched process (pidfd_getfd), and reports processes of the node and of other containers as its own over it
// held: both processes keep running; the exec fails or completes
// field: runc's init has such a socket, too, and runc reads the steps of the init from it
func TestForgedWords(t *testing.T) {
	n, c := execNode(t, noFilter)
	out, status := command(t, "gcc", "-O2", "-static", "-Wall", "-o", n.rootfs+"/attacker", "../../test/hostile/testdata/attacker.c")
	harness.Want(t, status == 0, "%v", out)
	other := n.container(t, "other", noFilter)
	victim := exec.Command("sleep", "1000000")
	harness.Check(t, victim.Start())
	ended := make(chan error, 1)
	go func() { ended <- victim.Wait() }()
	defer func() { _ = victim.Process.Kill() }()
	output, p, trace := outputOf(t), execProcess(), []string{"CAP_SYS_PTRACE"}
	p.Args = []string{"/attacker", "forge", strconv.Itoa(victim.Process.Pid), strconv.Itoa(other.pid)}
	p.Capabilities = &specs.LinuxCapabilities{Bounding: trace, Effective: trace, Permitted: trace}
	attacker, err := c.exec(t, t.Context(), p, func(e *launch.Exec) { e.Streams[1] = output })
	harness.Check(t, err)
	defer n.end(t, attacker)
	forged := func() int { return strings.Count(read(output.Name()), "forged") }
	failed := 0
	for forged() < 50 {
		if l, err := c.exec(t, t.Context(), execProcess()); err == nil {
			n.end(t, l)
		} else {
			failed++
		}
	}
	t.Logf("%d words were forged, %d execs failed", forged(), failed)
	select {
	case err := <-ended:
		t.Errorf("a process of the node was ended: %v", err)
	default:
	}
	harness.Want(t, !other.init.Ended(), "another container was ended")
}
