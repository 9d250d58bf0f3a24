package runtime

import (
	"encoding/json"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"testing"

	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/shim/stdio"
)

// What the daemon asks for as a pod's pause is launched, but with a user
// namespace.
func TestPausesAreLaunched(t *testing.T) {
	var cases []struct {
		Case string
		Spec *specs.Spec
	}
	content, err := os.ReadFile("../../oci/testdata/sandbox.json")
	if err == nil {
		err = json.Unmarshal(content, &cases)
	}
	if err != nil {
		t.Fatal(err)
	}
	spares, err := stdio.NewSpares("")
	if err != nil {
		t.Fatal(err)
	}
	defer spares.Close()
	streams := Streams{Stdin: spares.Receive, Stdout: spares.Send} // as the supervisor's
	launched, byInit := 0, 0
	for _, c := range cases {
		if c.Spec == nil {
			continue // an error
		}
		process, err := newProcess(c.Spec.Process)
		if err != nil {
			t.Fatal(err)
		}
		if slices.ContainsFunc(c.Spec.Linux.Namespaces, func(n specs.LinuxNamespace) bool { return n.Type == specs.UserNamespace }) {
			byInit++ // the namespace of the file is not there to be looked at
			continue
		}
		config, err := toConfig(c.Spec, "id", false, false)
		if err != nil {
			t.Fatal(err)
		}
		if why := needsInit(config, process, streams); why != "" {
			t.Errorf("%s: needs init for %s", c.Case, why)
		}
		launched++
	}
	if launched == 0 || byInit == 0 {
		t.Errorf("%d launched, %d by init: the file has changed", launched, byInit)
	}
}

// Each thing that a launch does not do is left to libcontainer's init.
func TestWhatIsNotLaunched(t *testing.T) {
	n := newNode(t)
	one, text := 1, "x"
	for name, change := range map[string]func(*configs.Config, *libcontainer.Process){
		"program to look for":                 func(_ *configs.Config, p *libcontainer.Process) { p.Args = []string{"pause"} },
		"no program":                          func(_ *configs.Config, p *libcontainer.Process) { p.Args = nil },
		"directory":                           func(_ *configs.Config, p *libcontainer.Process) { p.Cwd = "/proc" },
		"environment":                         func(_ *configs.Config, p *libcontainer.Process) { p.Env = []string{"A=1"} },
		"descriptors":                         func(_ *configs.Config, p *libcontainer.Process) { p.ExtraFiles = []*os.File{nil} },
		"new privileges":                      func(_ *configs.Config, p *libcontainer.Process) { p.NoNewPrivileges = new(bool) },
		"nothing said of new privileges":      func(_ *configs.Config, p *libcontainer.Process) { p.NoNewPrivileges = nil },
		"limits":                              func(_ *configs.Config, p *libcontainer.Process) { p.Rlimits = make([]configs.Rlimit, 1) },
		"capabilities":                        func(_ *configs.Config, p *libcontainer.Process) { p.Capabilities.Bounding = []string{"CAP_KILL"} },
		"all capabilities":                    func(_ *configs.Config, p *libcontainer.Process) { p.Capabilities = nil },
		"scheduler":                           func(_ *configs.Config, p *libcontainer.Process) { p.Scheduler = new(configs.Scheduler) },
		"AppArmor":                            func(_ *configs.Config, p *libcontainer.Process) { p.AppArmorProfile = text },
		"SELinux":                             func(_ *configs.Config, p *libcontainer.Process) { p.Label = text },
		"SELinux of mounts":                   func(c *configs.Config, _ *libcontainer.Process) { c.MountLabel = text },
		"joined pid namespace":                func(c *configs.Config, _ *libcontainer.Process) { c.Namespaces.Add(configs.NEWPID, "/proc/1/ns/pid") },
		"new network":                         func(c *configs.Config, _ *libcontainer.Process) { c.Namespaces.Add(configs.NEWNET, "") },
		"cgroup namespace":                    func(c *configs.Config, _ *libcontainer.Process) { c.Namespaces.Add(configs.NEWCGROUP, "") },
		"user namespace":                      func(c *configs.Config, _ *libcontainer.Process) { c.Namespaces.Add(configs.NEWUSER, "/proc/1/ns/user") },
		"mounts of the node":                  func(c *configs.Config, _ *libcontainer.Process) { c.Namespaces.Remove(configs.NEWNS) },
		"tmpfs":                               func(c *configs.Config, _ *libcontainer.Process) { c.Mounts[1].Device = "tmpfs" },
		"propagation":                         func(c *configs.Config, _ *libcontainer.Process) { c.Mounts[1].PropagationFlags = []int{unix.MS_SHARED} },
		"recursive bind":                      func(c *configs.Config, _ *libcontainer.Process) { c.Mounts[1].Flags |= unix.MS_REC },
		"no proc":                             func(c *configs.Config, _ *libcontainer.Process) { c.Mounts = c.Mounts[1:] },
		"writable root":                       func(c *configs.Config, _ *libcontainer.Process) { c.Readonlyfs = false },
		"propagated root":                     func(c *configs.Config, _ *libcontainer.Process) { c.RootPropagation = unix.MS_SHARED },
		"masked paths":                        func(c *configs.Config, _ *libcontainer.Process) { c.MaskPaths = []string{"/proc/kcore"} },
		"read-only paths":                     func(c *configs.Config, _ *libcontainer.Process) { c.ReadonlyPaths = []string{"/proc/sys"} },
		"hooks":                               func(c *configs.Config, _ *libcontainer.Process) { c.Hooks = configs.Hooks{configs.Prestart: nil} },
		"network devices":                     func(c *configs.Config, _ *libcontainer.Process) { c.Networks = make([]*configs.Network, 1) },
		"domain name":                         func(c *configs.Config, _ *libcontainer.Process) { c.Domainname = text },
		"umask":                               func(c *configs.Config, _ *libcontainer.Process) { c.Umask = new(uint32) },
		"a process that ends with its parent": func(c *configs.Config, _ *libcontainer.Process) { c.ParentDeathSignal = one },
		"cache and bandwidth":                 func(c *configs.Config, _ *libcontainer.Process) { c.IntelRdt = new(configs.IntelRdt) },
		"no root":                             func(c *configs.Config, _ *libcontainer.Process) { c.RootlessCgroups = true },
		"filter that allows":                  func(c *configs.Config, _ *libcontainer.Process) { c.Seccomp.DefaultAction = configs.Allow },
		"filter that kills":                   func(c *configs.Config, _ *libcontainer.Process) { c.Seccomp.Syscalls[0].Action = configs.Kill },
		"filter of arguments":                 func(c *configs.Config, _ *libcontainer.Process) { c.Seccomp.Syscalls[0].Args = make([]*configs.Arg, 1) },
		"filter of another machine":           func(c *configs.Config, _ *libcontainer.Process) { c.Seccomp.Architectures = []string{"x86"} },
		"filter with a flag": func(c *configs.Config, _ *libcontainer.Process) {
			c.Seccomp.Flags = []specs.LinuxSeccompFlag{specs.LinuxSeccompFlagLog}
		},
	} {
		spec := n.spec("id")
		config, err := toConfig(spec, "id", false, false)
		if err != nil {
			t.Fatal(err)
		}
		process, err := newProcess(spec.Process)
		if err != nil {
			t.Fatal(err)
		}
		if why := needsInit(config, process, Streams{}); why != "" {
			t.Fatalf("a plain pause needs init for %s", why)
		}
		change(config, process)
		if needsInit(config, process, Streams{}) == "" {
			t.Errorf("%s: it is launched", name)
		}
		for _, streams := range []Streams{{Terminal: true}, {Stdin: os.Stdin}, {Stderr: os.Stderr}} {
			if needsInit(config, process, streams) == "" {
				t.Errorf("with %+v it is launched", streams)
			}
		}
	}
}

// On a node that runs in a user namespace nothing is launched.
func TestNothingIsLaunchedInAUserNamespace(t *testing.T) {
	const inside = "MINICRI_TEST_INSIDE"
	if os.Getenv(inside) != "" {
		if initForNode() == "" {
			t.Error("in a user namespace pauses are launched")
		}
		return
	}
	if why := initForNode(); why != "" {
		t.Fatalf("on this node nothing is launched: %s", why)
	}
	again := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$")
	again.Env = append(os.Environ(), inside+"=1")
	again.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{HostID: 100000, Size: 1000}}, GidMappings: []syscall.SysProcIDMap{{HostID: 100000, Size: 1000}},
	}
	if out, err := again.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}
