package oci

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/test/harness"
)

// Containers as the kubelet asks for them, all rules together.
func TestForContainer(t *testing.T) {
	goldenContainers(t, "container", func(s *specs.Spec) any {
		if s.Linux.Seccomp != nil { // see TestContainerSeccomp
			s.Linux.Seccomp = &specs.LinuxSeccomp{DefaultAction: s.Linux.Seccomp.DefaultAction}
		}
		return s
	}, func(c *Container) (*specs.Spec, error) {
		plan, err := ForContainer(c)
		return plan.Spec, err
	})
}

// cri: CDIDevice.name Capability.add_ambient_capabilities ContainerConfig.CDI_devices
// cri: LinuxContainerResources.cpuset_mems LinuxContainerResources.unified
// cri: LinuxContainerSecurityContext.apparmor LinuxContainerSecurityContext.apparmor_profile
// cri: Mount.mount_options Mount.recursive_read_only LinuxContainerConfig.security_context ContainerConfig.linux
// cri: LinuxContainerSecurityContext.masked_paths LinuxContainerSecurityContext.readonly_paths
// cri: LinuxContainerSecurityContext.readonly_rootfs Capability.add_capabilities Capability.drop_capabilities
// cri: LinuxContainerSecurityContext.capabilities
func TestContainerRules(t *testing.T) {
	for _, test := range []struct {
		golden string
		rule   func(*Container, *specs.Spec) error
		part   func(*specs.Spec) any
	}{
		{"container_process", containerProcess, func(s *specs.Spec) any { return s.Process }},
		{"container_env", containerEnv, func(s *specs.Spec) any { return s.Process.Env }},
		{"container_user", containerUser, func(s *specs.Spec) any { return s.Process.User }},
		{"container_capabilities", containerCapabilities, func(s *specs.Spec) any { return s.Process.Capabilities }},
		{"container_namespaces", containerNamespaces, func(s *specs.Spec) any { return s.Linux.Namespaces }},
		{"container_mounts", containerMounts, func(s *specs.Spec) any { return s.Mounts }},
		{"container_hidden", containerHiddenPaths, hiddenPart},
		{"container_resources", containerResources, func(s *specs.Spec) any { return s.Linux.Resources }},
		{"container_devices", containerDevices, devicesPart},
		{"container_cdi", containerCDI, func(s *specs.Spec) any { return s }},
		{"container_apparmor", containerProfiles, func(s *specs.Spec) any { return s.Process.ApparmorProfile }},
	} {
		t.Run(test.golden, func(t *testing.T) { goldenRule(t, test.golden, test.rule, test.part) })
	}
}

// A runtime that makes a sandbox for each container is not told that there is one of the
// pod, and gets options of mounts alone that every runtime knows; any other is, and does.
func TestSandboxPerContainer(t *testing.T) {
	const kind = "io.kubernetes.cri.container-type"
	for own, want := range map[bool]struct{ kind, option string }{
		true:  {"", "nosuid"},
		false: {"container", "rnosuid"},
	} {
		c := &Container{
			SandboxID: "sandbox", Config: &runtimeapi.ContainerConfig{}, Pod: &runtimeapi.PodSandboxConfig{},
			Machine: machine.Machine{RecursiveReadOnly: true}, Defaults: Defaults{OwnSandbox: own},
		}
		spec, err := c.newSpec()
		must(t, err)
		annotations := spec.Annotations
		harness.Want(t, annotations[kind] == want.kind && annotations["io.kubernetes.cri.sandbox-id"] == "sandbox",
			"own sandbox %t: annotations %v", own, annotations)
		bound, err := bind(c, &mount{HostPath: "/", MountOptions: []string{"nosuid"}}, spec)
		harness.Want(t, err == nil && slices.Contains(bound.Options, want.option), "own sandbox %t: options %v, %v",
			own, bound.Options, err)
	}
}

func hiddenPart(s *specs.Spec) any {
	return map[string][]string{"masked": s.Linux.MaskedPaths, "readonly": s.Linux.ReadonlyPaths}
}

func devicesPart(s *specs.Spec) any {
	return map[string]any{"nodes": s.Linux.Devices, "rules": s.Linux.Resources.Devices, "mounts": s.Mounts}
}

func TestForExec(t *testing.T) {
	spec := &specs.Spec{Process: &specs.Process{
		Args: []string{"/server"}, Cwd: "/app", Env: make([]string, 1, 8), User: specs.User{
			UID:            7,
			AdditionalGids: []uint32{8},
		},
		Capabilities: &specs.LinuxCapabilities{Bounding: []string{"CAP_KILL"}}, NoNewPrivileges: true,
	}}
	spec.Process.Env[0] = "A=1"
	want := *spec.Process
	want.Args = []string{"ls"}
	harness.Same(t, "an exec", *ForExec(spec.Process, []string{"ls"}, false), want)
	want.Terminal, want.Env = true, []string{"A=1", "TERM=xterm"}
	harness.Same(t, "an exec with a terminal", *ForExec(spec.Process, []string{"ls"}, true), want)
	harness.Need(t, len(spec.Process.Env) == 1, "the container's own process has changed: %+v", spec.Process)
	harness.Want(t, spec.Process.Env[:2][1] == "", "the container's own process has changed: %+v", spec.Process)
	harness.Want(t, spec.Process.Args[0] == "/server", "the container's own process has changed: %+v", spec.Process)
	spec.Process.Env = []string{"TERM=linux"}
	harness.Same(t, "the environment", ForExec(spec.Process, []string{"ls"}, true).Env, []string{"TERM=linux"})
}

func TestCgroupsPath(t *testing.T) {
	for _, test := range []struct {
		parent  string
		systemd bool
		path    string
		dir     string // below each hierarchy
	}{
		{"/kubepods/burstable/pod1", false, "/kubepods/burstable/pod1/abc", "/kubepods/burstable/pod1/abc"},
		{"kubepods", false, "/kubepods/abc", "/kubepods/abc"},
		{"", false, "/abc", "/abc"},
		{"/a//b/./", false, "/a/b/abc", "/a/b/abc"},
		{
			"kubepods-pod1.slice", true, "kubepods-pod1.slice:cri-containerd:abc",
			"/kubepods.slice/kubepods-pod1.slice/cri-containerd-abc.scope",
		},
		// The kubelet sends the whole path of the slice.
		{
			"/kubepods.slice/kubepods-pod1.slice", true, "kubepods-pod1.slice:cri-containerd:abc",
			"/kubepods.slice/kubepods-pod1.slice/cri-containerd-abc.scope",
		},
		{"/kubepods.slice/", true, "kubepods.slice:cri-containerd:abc", "/kubepods.slice/cri-containerd-abc.scope"},
		{"-.slice", true, "-.slice:cri-containerd:abc", "/cri-containerd-abc.scope"},
	} {
		path := CgroupsPath(test.parent, "abc", test.systemd)
		dir := cgroup.Path(path)
		harness.Want(t, path == test.path && dir == test.dir, "%q, systemd %v: %q and %q, want %q and %q",
			test.parent, test.systemd, path, dir, test.path, test.dir)
	}
}

func must(t testing.TB, err error) { t.Helper(); harness.Check(t, err) }

// A seccomp profile is in sandbox.json by its name alone.
//
// cri: LinuxSandboxSecurityContext.run_as_group LinuxSandboxSecurityContext.run_as_user Int64Value.value
// cri: LinuxSandboxSecurityContext.supplemental_groups LinuxSandboxSecurityContext.readonly_rootfs
// cri: LinuxSandboxSecurityContext.apparmor LinuxSandboxSecurityContext.seccomp SecurityProfile.profile_type
// cri: LinuxSandboxSecurityContext.seccomp_profile_path SecurityProfile.localhost_ref
func TestForSandbox(t *testing.T) {
	for name, part := range map[string]func(*specs.Spec) any{
		"sandbox":  func(s *specs.Spec) any { return s },
		"apparmor": func(s *specs.Spec) any { return s.Process.ApparmorProfile },
		"user":     func(s *specs.Spec) any { return s.Process.User },
		"seccomp":  func(s *specs.Spec) any { return s.Linux.Seccomp },
		"sysctl":   func(s *specs.Spec) any { return s.Linux.Sysctl },
		"namespaces": func(s *specs.Spec) any {
			return struct {
				Hostname   string                 `json:"hostname,omitempty"`
				Namespaces []specs.LinuxNamespace `json:"namespaces"`
			}{s.Hostname, s.Linux.Namespaces}
		},
	} {
		t.Run(name, func(t *testing.T) { goldenSandboxes(t, name, part) })
	}
}

// FuzzPasswd: the files of an image name no user or group whose number is not one, and a number in the image's
// configuration stays that number. They give nobody more groups than a process can have.
func FuzzPasswd(f *testing.F) {
	f.Add("web:www", []byte("root:x:0:0::/root:/bin/sh\nweb:x:1000:1000::/:/bin/sh\n"),
		[]byte("www:x:5:web\nextra:x:6:web\n"))
	f.Add("1000", []byte("1000:x:0:0::/:\n"), []byte(""))
	f.Add("u", []byte("u:x:4294967296:-1::/:\n"), []byte("u:x:99999999999999999999:u\n"))
	var groups []byte
	for group := range 70_000 {
		groups = fmt.Appendf(groups, "g:x:%d:u\n", group)
	}
	f.Add("u", []byte("u:x:1:1::/:\n"), groups)
	f.Add("u", []byte("u:x:1:1::/caf\xe9:\n"), []byte(""))
	f.Add(":", []byte(":::::::\n::\n"), []byte("\x00:\n"))
	f.Fuzz(func(t *testing.T, wanted string, passwd, group []byte) {
		c := &Container{Image: Image{User: wanted}, Passwd: passwd, Group: group}
		spec := &specs.Spec{Process: &specs.Process{}}
		err := containerUser(c, spec)
		groups := len(spec.Process.User.AdditionalGids)
		harness.Want(t, err != nil || groups <= 1<<16, "user %q has %d groups", wanted, groups)
		if containerHome(c, spec) == nil { // JSON carries it
			harness.Want(t, utf8.ValidString(spec.Process.Env[0]), "the home of user %q is %q", wanted,
				spec.Process.Env)
		}
		found, err := lookUp(c, wanted, "")
		if err != nil {
			return
		}
		for _, id := range append(found.Sgids, found.Uid, found.Gid) {
			harness.Want(t, id >= 0 && id <= 1<<31-1, "user %q has the id %d", wanted, id)
		}
		harness.Want(t, wanted != "1000" || found.Uid == 1000, "user 1000 is %d", found.Uid)
	})
}

// attack: images: /etc/group has 700,000 groups with root as a member, eight containers are created at once
// held: a file of more than 1 MiB is refused; one of 1 MiB takes less than 100 MiB, one creation at a time, and is refused
// field: containerd parses files of any size, for each creation
func TestUsersOfAnImageCostLittle(t *testing.T) {
	var group []byte
	for i := 0; len(group) < 1<<20-16; i++ {
		group = fmt.Appendf(group, ":x:%d:root\n", i)
	}
	c := &Container{Passwd: []byte("root:x:0:0::/root:/bin/sh\n"), Group: group}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	spec := &specs.Spec{Process: &specs.Process{}}
	_ = errors.Join(containerUser(c, spec), containerHome(c, spec))
	runtime.ReadMemStats(&after)
	taken := after.TotalAlloc - before.TotalAlloc
	harness.Want(t, taken <= 100<<20, "the users of an image took %d MiB", taken>>20)
}

const (
	private       = runtimeapi.MountPropagation_PROPAGATION_PRIVATE
	hostToPod     = runtimeapi.MountPropagation_PROPAGATION_HOST_TO_CONTAINER
	bidirectional = runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL
)

// With real mounts, in a mount namespace of the test's own, whose thread ends with it.
//
// cri: Mount.propagation
func TestPropagate(t *testing.T) {
	runtime.LockOSThread()
	must(t, errors.Join(unix.Unshare(unix.CLONE_NEWNS|unix.CLONE_FS),
		unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))) // needs root
	dir := t.TempDir()
	for name, flag := range map[string]uintptr{
		"private": unix.MS_PRIVATE, "shared": unix.MS_SHARED,
		"slave": unix.MS_SLAVE,
	} {
		mountTmpfs(t, filepath.Join(dir, name), flag)
	}
	// On top of a shared mount, and deeper than one.
	mountTmpfs(t, filepath.Join(dir, "shared", "deep"), unix.MS_PRIVATE)
	for _, test := range []struct {
		source       string
		mode         runtimeapi.MountPropagation
		option, root string
		says         string
	}{
		{"private", private, "rprivate", "", ""},
		{"shared", private, "rprivate", "", ""},
		{"private", hostToPod, "", "", "mount --make-rshared"},
		{"private", bidirectional, "", "", "mount --make-rshared"},
		{"shared", hostToPod, "rslave", "rslave", ""},
		{"shared", bidirectional, "rshared", "rshared", ""},
		{"slave", hostToPod, "rslave", "rslave", ""},
		{"slave", bidirectional, "", "", "propagates nothing"},
		{"shared/deep", hostToPod, "", "", "shared/deep"},
		{"shared/deeper", hostToPod, "rslave", "rslave", ""},
	} {
		source := filepath.Join(dir, test.source)
		spec := &specs.Spec{Linux: &specs.Linux{}}
		option, err := propagate(source, test.mode, spec)
		if test.says != "" {
			harness.Want(t, err != nil && strings.Contains(err.Error(), test.says),
				"%s, %v: %v, want an error that says %q", test.source, test.mode, err, test.says)
		} else if err != nil || option != test.option || spec.Linux.RootfsPropagation != test.root {
			t.Errorf("%s, %v: option %q, root %q, %v", test.source, test.mode, option, spec.Linux.RootfsPropagation,
				err)
		}
	}
}

// mountTmpfs mounts one, or, with a propagation of slaves, one that is a slave of a mount below it.
func mountTmpfs(t *testing.T, place string, propagation uintptr) {
	must(t, errors.Join(os.MkdirAll(place, 0o755), unix.Mount("test", place, "tmpfs", 0, "")))
	t.Cleanup(func() { _ = unix.Unmount(place, unix.MNT_DETACH) })
	if propagation == unix.MS_SLAVE {
		must(t, errors.Join(unix.Mount("", place, "", unix.MS_SHARED, ""),
			unix.Mount(place, place, "", unix.MS_BIND, "")))
		t.Cleanup(func() { _ = unix.Unmount(place, unix.MNT_DETACH) })
	}
	must(t, unix.Mount("", place, "", propagation, ""))
}

// All devices below a directory are given, in their places, and nothing else.
func TestDevicesOfADirectory(t *testing.T) {
	dir := t.TempDir()
	for name, number := range map[string]uint32{
		"a": uint32(unix.Mkdev(1, 3)), "sub/b": uint32(unix.Mkdev(1, 5)),
		"pts/c": uint32(unix.Mkdev(1, 7)),
	} {
		path := filepath.Join(dir, name)
		must(t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o755),
			unix.Mknod(path, unix.S_IFCHR|0o600, int(number)))) // needs root
	}
	must(t, errors.Join(os.WriteFile(filepath.Join(dir, "file"), nil, 0o600),
		os.Symlink("a", filepath.Join(dir, "link"))))
	config := &runtimeapi.ContainerConfig{Devices: []*runtimeapi.Device{{
		HostPath: dir, ContainerPath: "/dev/vendor/",
		Permissions: "r",
	}}}
	spec := &specs.Spec{Linux: &specs.Linux{}}
	must(t, containerDevices(&Container{Config: config}, spec))
	var got []string
	for _, device := range spec.Linux.Devices {
		got = append(got, device.Path)
	}
	harness.Want(t, strings.Join(got, " ") == "/dev/vendor/a /dev/vendor/sub/b", "the devices are %q", got)
	harness.Want(t, len(spec.Linux.Resources.Devices) == 3,
		"the rules are %+v, want one to deny all and one for each", spec.Linux.Resources.Devices)
}
