package launch_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/opencontainers/runc/libcontainer"
	_ "github.com/opencontainers/runc/libcontainer/nsenter" // this program is libcontainer's init, too
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/supervisor/bundle"
	"github.com/minicri/minicri/supervisor/engine"
	"github.com/minicri/minicri/supervisor/launch"
	"github.com/minicri/minicri/supervisor/starter"
	"github.com/minicri/minicri/test/harness"
)

func init() {
	switch {
	case len(os.Args) > 1 && os.Args[1] == "init":
		libcontainer.Init()
	case len(os.Args) > 1 && os.Args[1] == starter.Command:
		if err := engine.Main(); err != nil {
			fmt.Fprintln(os.Stderr, "starter:", err)
		}
		os.Exit(0)
	case len(os.Args) > 1 && os.Args[1] == "filters":
		pid, _ := strconv.Atoi(os.Args[2])
		fmt.Println(filtersOf(pid))
		os.Exit(0)
	}
}

// family are the children of this process, all tests'.
var family = sync.OnceValue(func() *process.Parent {
	c, err := process.NewParent()
	if err != nil {
		panic(err)
	}
	go c.Run(context.Background())
	return c
})

// node is where pauses of a test are made.
type node struct {
	*launch.Launcher
	starters           *starter.Starters // this program is theirs, too
	dir, rootfs, empty string
	parent             string // of their cgroups: a directory, or a slice
}

func bySystemd() bool { return harness.CgroupDriver() == "systemd" }

func (n *node) facts(id string) bundle.Container {
	return bundle.Container{ID: id, Root: n.dir, CgroupsPath: n.cgroupOf(id), SystemdCgroup: bySystemd()}
}

func newNode(t *testing.T) *node {
	dir, err := os.MkdirTemp("", "launch-")
	harness.Check(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	shareMounts(t, dir)
	n := &node{
		Launcher: launch.New(family()), dir: dir, parent: fmt.Sprintf("/minicri-launch-%d", time.Now().UnixNano()),
		rootfs: filepath.Join(dir, "rootfs"), empty: filepath.Join(dir, "empty"),
	}
	n.starters, err = starter.New(family(), slog.Default())
	harness.Check(t, err)
	t.Cleanup(n.starters.Close)
	program, err := os.ReadFile("../../oci/pause/pause.elf")
	harness.Want(t, err == nil, "run `make build`: %v", err)
	for _, made := range []string{n.empty, n.rootfs + "/proc", n.rootfs + "/dev", dir + "/states"} {
		err = errors.Join(err, os.MkdirAll(made, 0o755))
	}
	err = errors.Join(err, os.Chmod(dir, 0o755), os.WriteFile(n.rootfs+"/pause", program, 0o555))
	// libcontainer does this to a process that loads a filter of devices (version 2 has no
	// other): what we start has it after that, and what comes before has not.
	if e := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}); !errors.Is(e, unix.EPERM) {
		err = errors.Join(err, e)
	}
	harness.Check(t, err)
	if bySystemd() {
		n.parent = fmt.Sprintf("minicrilaunch%d.slice", time.Now().UnixNano())
	}
	t.Cleanup(func() { n.removeParent(t) })
	return n
}

// shareMounts makes a directory what it is on a node, where systemd shares all mounts
// (systemd(1)), and fails the test if something is mounted in it in the end.
func shareMounts(t *testing.T, dir string) {
	harness.Check(t, errors.Join(unix.Mount(dir, dir, "", unix.MS_BIND, ""), unix.Mount("", dir, "", unix.MS_SHARED, "")))
	t.Cleanup(func() {
		for mount := range strings.Lines(read("/proc/thread-self/mountinfo")) {
			harness.Want(t, !strings.HasPrefix(strings.Fields(mount)[4], dir+"/"), "a mount is left on the node: %s", mount)
		}
		err := unix.Unmount(dir, unix.MNT_DETACH)
		harness.Want(t, err == nil, "%v", err)
	})
}

// removeParent fails the test if there is anything left below it.
func (n *node) removeParent(t *testing.T) {
	for _, hierarchy := range []string{"/sys/fs/cgroup/*", "/sys/fs/cgroup"} {
		left, _ := filepath.Glob(filepath.Join(hierarchy, n.parent, "*", "cgroup.procs"))
		harness.Want(t, len(left) == 0, "left are %v", left)
		groups, _ := filepath.Glob(filepath.Join(hierarchy, n.parent))
		for _, group := range groups {
			err := os.Remove(group)
			harness.Want(t, err == nil || bySystemd(), "something is left: %v", err)
		}
	}
	if bySystemd() {
		said, status := command(t, "systemctl", "stop", n.parent)
		harness.Want(t, status == 0, "systemctl stop: %d: %s", status, said)
	}
}

// run runs this program or another one to its end: nothing but our children may wait for one.
func run(t *testing.T, program string, args ...string) (output string, status int) {
	reader, writer, err := os.Pipe()
	harness.Check(t, err)
	defer reader.Close()
	child, err := family().Start(func() (int, error) {
		return syscall.ForkExec(program, append([]string{program}, args...), &syscall.ProcAttr{Env: os.Environ(), Files: []uintptr{reader.Fd(), writer.Fd(), 2}})
	}, nil)
	harness.Check(t, errors.Join(err, writer.Close()))
	said, err := io.ReadAll(reader)
	harness.Check(t, err)
	return string(said), child.Wait().ExitStatus()
}

func command(t *testing.T, name string, args ...string) (output string, status int) {
	path, err := exec.LookPath(name)
	harness.Check(t, err)
	return run(t, path, args...)
}

// seccompOf has those of filtersOf, by a process of its own: ours waits for children only.
func seccompOf(t *testing.T, pid int) string {
	out, status := run(t, "/proc/self/exe", "filters", strconv.Itoa(pid))
	harness.Want(t, status == 0 && strings.HasSuffix(out, "<nil>\n"), "the filters of process %d: %d: %s", pid, status, out)
	return out
}

// ask has libcontainer do something, in a starter.
func (n *node) ask(r starter.Request, files ...*os.File) (pid int, err error) {
	r.Root, r.SystemdCgroup, r.Bundle, r.CgroupsPath = n.dir+"/states", bySystemd(), n.bundle(r.ID), n.cgroupOf(r.ID)
	err = n.starters.Run(context.Background(), r, files, func(answer starter.Answer, _ *process.Child) (err error) {
		if pid = answer.PID; pid > 0 {
			_, err = family().Own(pid, nil)
		}
		return err
	})
	return pid, err
}

func (n *node) bundle(id string) string { return filepath.Join(n.dir, "bundles", id) }

// cgroupOf is where a container is, in the form of the driver.
func (n *node) cgroupOf(id string) string {
	if bySystemd() {
		return n.parent + ":minicrilaunch:" + id
	}
	return n.parent + "/" + id
}

// spec is that of a plain pod's pause.
func (n *node) spec(id string) *specs.Spec {
	return &specs.Spec{
		Version: specs.Version, Root: &specs.Root{Path: n.rootfs, Readonly: true},
		Process: &specs.Process{Args: []string{"/pause"}, Cwd: "/", NoNewPrivileges: true, Capabilities: &specs.LinuxCapabilities{}, OOMScoreAdj: new(100)},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
			{Destination: "/dev", Type: "bind", Source: n.empty, Options: []string{"bind", "ro", "nosuid", "noexec", "nodev"}},
		},
		Linux: &specs.Linux{
			CgroupsPath: n.cgroupOf(id),
			Namespaces:  []specs.LinuxNamespace{{Type: specs.MountNamespace}, {Type: specs.UTSNamespace}, {Type: specs.IPCNamespace}, {Type: specs.PIDNamespace}},
			Resources:   &specs.LinuxResources{CPU: &specs.LinuxCPU{Shares: new(uint64(2))}}, Seccomp: allowing(initCalls...),
		},
	}
}

// initCalls are those that pause, launches and libcontainer's init make under a filter.
var initCalls = []string{
	"rt_sigprocmask", "rt_sigtimedwait", "wait4", "exit_group", "openat", "openat2", "write", "close", "execve", "close_range", "fcntl", "futex",
	"statx", "fstatfs", "fstat", "readlinkat", "getdents64", "epoll_ctl", "epoll_pwait", "mmap", "munmap", "madvise", "rt_sigaction", "sigaltstack",
	"rt_sigreturn", "nanosleep", "getpid", "tgkill", "gettid", "read", "dup3", "newfstatat", "lseek", "sched_yield", "prlimit64",
	"clock_gettime", // of a machine without a vdso, such as User-mode Linux
}

// allowing allows calls and refuses all others, as pause's default profile does.
func allowing(calls ...string) *specs.LinuxSeccomp {
	return &specs.LinuxSeccomp{
		DefaultAction: specs.ActErrno, DefaultErrnoRet: new(uint(unix.EPERM)),
		Syscalls: []specs.LinuxSyscall{{Action: specs.ActAllow, Names: calls}},
	}
}

func read(path string) string {
	content, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	return string(content)
}

// rests waits until a process has executed a program and sleeps in it.
func rests(t *testing.T, pid int, args []string) {
	proc := "/proc/" + strconv.Itoa(pid)
	harness.Eventually(t, fmt.Sprintf("%v comes to rest", args), func() bool {
		return read(proc+"/cmdline") == strings.Join(args, "\x00")+"\x00" && strings.Contains(read(proc+"/status"), "\nState:\tS")
	})
}

// gone waits until a process has ended.
func gone(t *testing.T, pid int) {
	harness.Eventually(t, "the process is gone", func() bool { return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) })
}

// nothingLeft fails the test unless our only children are those, and a starter that waits ready.
func nothingLeft(t *testing.T, but ...int) {
	harness.Eventually(t, "no child is left", func() bool {
		tasks, _ := filepath.Glob("/proc/self/task/*/children")
		for _, task := range tasks {
			for _, pid := range strings.Fields(read(task)) {
				number, _ := strconv.Atoi(pid)
				if !slices.Contains(but, number) && !strings.HasPrefix(read("/proc/"+pid+"/cmdline"), "minicri-shim\x00"+starter.Command) {
					return false
				}
			}
		}
		return true
	})
}
