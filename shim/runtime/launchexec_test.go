package runtime

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// execVariants are what clients, and the containers that they ask for, have.
var execVariants = map[string]func(*specs.Process){
	"as root": func(*specs.Process) {},
	"by PATH, as a user of /etc/passwd": func(p *specs.Process) {
		p.Args = []string{"pause", "with", "arguments"}
		p.User = specs.User{UID: 1234, GID: 5678, AdditionalGids: []uint32{7, 8, 100000}}
	},
	"as a user whom /etc/passwd does not have": func(p *specs.Process) { p.User = specs.User{UID: 99, GID: 99} },
	"the last variable of a name counts": func(p *specs.Process) {
		p.Env = append(p.Env, "A=1", "HOME=/tmp", "A=2", "B=\"x y\"", "HOME=", "EMPTY=")
	},
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
	mayGetPrivileges: func(p *specs.Process) { p.NoNewPrivileges = false },
}

// mayGetPrivileges is not launched where there is a filter: that would have to allow
// what drops the privileges.
const mayGetPrivileges = "privileges that it may get"

// execNode is a node with a container whose image has a little more than pause.
func execNode(t *testing.T, change func(*specs.Spec)) (*node, *builtinContainer) {
	t.Helper()
	n := newNode(t)
	err := errors.Join(
		os.MkdirAll(n.rootfs+"/etc", 0o755), os.MkdirAll(n.rootfs+"/work/real", 0o755), os.MkdirAll(n.rootfs+"/bin/pause", 0o755),
		os.Symlink("real", n.rootfs+"/work/link"),
		os.WriteFile(n.rootfs+"/etc/passwd", []byte("root:x:0:0:root:/root:/bin/sh\napp:x:1234:5678::/home/app:/bin/sh\n"), 0o644),
		os.WriteFile(n.rootfs+"/text", []byte("no program"), 0o755),
	)
	if err != nil {
		t.Fatal(err)
	}
	id := "exec" + strconv.Itoa(os.Getpid())
	spec := n.spec(id)
	change(spec)
	made, init, err := n.make(id, spec, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = init.Signal(syscall.SIGKILL)
		init.Wait()
		if err := errors.Join(made.Delete(), init.Close()); err != nil {
			t.Error(err)
		}
	})
	if err := made.Start(); err != nil {
		t.Fatal(err)
	}
	return n, made.(*builtinContainer)
}

func execProcess() *specs.Process {
	return &specs.Process{
		Args: []string{"/pause"}, Cwd: "/", NoNewPrivileges: true, Capabilities: &specs.LinuxCapabilities{},
		Env: []string{"PATH=/nowhere:/"},
	}
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
	}
	for name, change := range containers {
		t.Run(name, func(t *testing.T) {
			_, c := execNode(t, change)
			for name, change := range execVariants {
				if name == mayGetPrivileges && c.lib.Config().Seccomp != nil {
					continue
				}
				t.Run(name, func(t *testing.T) {
					want := c.lookExec(t, change, c.start)
					got := c.lookExec(t, change, c.onlyLaunched(t))
					for key := range want {
						if got[key] != want[key] {
							t.Errorf("%s:\n--- launched\n%s\n--- by init\n%s", key, got[key], want[key])
						}
					}
				})
			}
		})
	}
}

// What may trace the processes of a container must not see one that has not joined
// its mount namespace yet.
func TestExecBesideTracersIsNotLaunched(t *testing.T) {
	n := newNode(t)
	for name, test := range map[string]struct {
		change func(*configs.Config)
		launch bool
	}{
		"plain":                        {func(*configs.Config) {}, true},
		"all but to trace":             {func(c *configs.Config) { c.Capabilities.Bounding = []string{"CAP_SYS_ADMIN"} }, true},
		"may trace":                    {func(c *configs.Config) { c.Capabilities.Bounding = []string{"CAP_CHOWN", "CAP_SYS_PTRACE"} }, false},
		"nothing said of capabilities": {func(c *configs.Config) { c.Capabilities = nil }, false},
		"processes of a pod":           {func(c *configs.Config) { c.Namespaces.Add(configs.NEWPID, "/proc/1/ns/pid") }, false},
		"processes of the node, may trace": {func(c *configs.Config) {
			c.Namespaces.Remove(configs.NEWPID)
			c.Capabilities.Bounding = []string{"CAP_SYS_PTRACE"}
		}, true},
	} {
		config, err := toConfig(n.spec("id"), "id", false, false)
		if err != nil {
			t.Fatal(err)
		}
		process, err := newProcess(execProcess())
		if err != nil {
			t.Fatal(err)
		}
		test.change(config)
		if why := execNeedsInit(config, process, Streams{}); (why == "") != test.launch {
			t.Errorf("%s: init is needed for %q", name, why)
		}
	}
}

// onlyLaunched is startExec without its other way.
func (c *builtinContainer) onlyLaunched(t *testing.T) execStart {
	return func(p *libcontainer.Process, s Streams, tree *tree) (*Process, error) {
		config := c.lib.Config()
		if why := execNeedsInit(&config, p, s); why != "" {
			t.Fatal("it is not launched: " + why)
		}
		return c.launchExec(&config, p, s, tree)
	}
}

type execStart func(*libcontainer.Process, Streams, *tree) (*Process, error)

func (c *builtinContainer) lookExec(t *testing.T, change func(*specs.Process), start execStart) map[string]string {
	t.Helper()
	spec := execProcess()
	change(spec)
	process, err := newProcess(spec)
	if err != nil {
		t.Fatal(err)
	}
	output, err := os.Create(filepath.Join(t.TempDir(), "output"))
	if err != nil {
		t.Fatal(err)
	}
	defer output.Close()
	tree := c.execs.newTree()
	process.SubCgroupPaths = map[string]string{tree.controller: tree.sub}
	p, err := start(process, Streams{Stdout: output}, tree)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := p.KillTree(); err != nil {
			t.Error(err)
		}
		p.Wait()
		_ = p.Close()
	}()
	proc := "/proc/" + strconv.Itoa(p.PID)
	want := strings.Join(process.Args, "\x00") + "\x00"
	for deadline := time.Now().Add(time.Minute); read(proc+"/cmdline") != want || !strings.HasPrefix(field(read(proc+"/status"), "State:"), "S"); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("pause does not come to rest: %q", read(proc+"/cmdline"))
		}
	}
	seen := seenOf(p.PID, c.lib.ID())
	inside := regexp.MustCompile(`(?m)^(NS\w+:\s+\d+)\s+\d+$`) // pids of the namespace are counted
	pid, path := regexp.MustCompile(`\b`+strconv.Itoa(p.PID)+`\b`), output.Name()
	for key, value := range seen {
		seen[key] = pid.ReplaceAllString(inside.ReplaceAllString(strings.ReplaceAll(value, path, "OUTPUT"), "$1"), "PID")
	}
	var stat syscall.Stat_t
	if err := syscall.Stat(path, &stat); err != nil {
		t.Fatal(err)
	}
	seen["owner of the output"] = fmt.Sprint(stat.Uid, stat.Gid)
	return seen
}

// What cannot be started is refused as libcontainer does it, and nothing of it is left.
func TestExecThatCannotBeLaunched(t *testing.T) {
	n, c := execNode(t, func(*specs.Spec) {})
	for name, change := range map[string]func(*specs.Process){
		"no such program":              func(p *specs.Process) { p.Args = []string{"/no/such/program"} },
		"no such program in PATH":      func(p *specs.Process) { p.Args = []string{"no-such-program"} },
		"no program but a text":        func(p *specs.Process) { p.Args = []string{"/text"} },
		"a directory":                  func(p *specs.Process) { p.Args = []string{"/etc"} },
		"no such working directory":    func(p *specs.Process) { p.Cwd = "/no/such/directory" },
		"a directory of the node":      func(p *specs.Process) { p.Cwd = "/proc/self/fd/3" },
		"a limit that is out of range": func(p *specs.Process) { p.Rlimits = []specs.POSIXRlimit{{Type: "RLIMIT_CORE", Soft: 2, Hard: 1}} },
	} {
		t.Run(name, func(t *testing.T) {
			ended := map[string]string{}
			for way, start := range map[string]execStart{"init": c.start, "launch": c.startExec} {
				spec := execProcess()
				change(spec)
				process, err := newProcess(spec)
				if err != nil {
					t.Fatal(err)
				}
				p, err := start(process, Streams{}, nil)
				if err == nil { // libcontainer's init says it too late for an error
					status, known := p.Wait()
					err = errors.Join(fmt.Errorf("exit status %d, %v", status.ExitStatus(), known), p.Close())
				}
				ended[way] = err.Error()
			}
			if ended["init"] != ended["launch"] || ended["init"] == "exit status 0, true" {
				t.Errorf("launched: %s\nby init:  %s", ended["launch"], ended["init"])
			}
		})
	}
	if pids := listChildren(); len(pids) > 1 {
		t.Errorf("children are left besides the container's first process: %v", pids)
	}
	if owned := len(n.children.owned); owned != 1 {
		t.Errorf("%d children have an owner, want 1", owned)
	}
}

// In a directory of PATH of the name of the program nothing is executed, and the
// search continues (execvp(3)).
func TestExecFindsTheProgramBehindADirectory(t *testing.T) {
	_, c := execNode(t, func(*specs.Spec) {})
	spec := execProcess()
	spec.Env, spec.Args = []string{"PATH=/bin:/"}, []string{"pause"}
	process, err := newProcess(spec)
	if err != nil {
		t.Fatal(err)
	}
	p, err := c.startExec(process, Streams{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if err := p.Signal(unix.SIGKILL); err != nil {
		t.Error(err)
	}
	if status, known := p.Wait(); !known || status.Signal() != unix.SIGKILL {
		t.Errorf("%v, %v", status, known)
	}
}
