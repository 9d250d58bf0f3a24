package oci

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/test/harness"
)

var update = flag.Bool("update", false, "write what the rules make into testdata, instead of comparing")

// goldenCase is one entry of a golden file: what is given, written by hand, and what is
// made of it, which -update fills in. $HOST stands for a directory of the test's own.
type goldenCase struct {
	Case string `json:"case"`
	// Config is a PodSandboxConfig, for containers a ContainerConfig, in the JSON form of
	// protobuf. Pod is the PodSandboxConfig of a container.
	Pod    json.RawMessage `json:"pod,omitempty"`
	Config json.RawMessage `json:"config"`
	NetNS  string          `json:"netns,omitempty"`
	UserNS string          `json:"userns,omitempty"`
	// Files are made below $HOST: text, a directory if it is "/", or a link if
	// it begins with "-> ". The rootfs is $HOST/rootfs.
	Files       map[string]string `json:"files,omitempty"`
	Image       Image             `json:"image,omitzero"`
	ImageMounts map[string]string `json:"imageMounts,omitempty"`
	Namespaces  Namespaces        `json:"namespaces,omitzero"`
	PidsLimit   int64             `json:"pidsLimit,omitempty"`
	Machine     machine.Machine   `json:"machine,omitzero"`
	Spec        json.RawMessage   `json:"spec,omitempty"`
	Error       string            `json:"error,omitempty"`
}

// golden compares the part of a spec that the cases of testdata/NAME.json are about with
// what is written there, or writes it there.
func golden(t *testing.T, name string, part func(*specs.Spec) any, makeSpec func(*testing.T, goldenCase, string) (*specs.Spec, error)) {
	cases := readGolden(t, name)
	for i := range cases {
		want, host := &cases[i], t.TempDir()
		got := *want
		got.Spec, got.Error = nil, ""
		if spec, err := makeSpec(t, *want, host); err != nil {
			got.Error = strings.ReplaceAll(err.Error(), host, "$HOST")
		} else {
			got.Spec = bytes.ReplaceAll(compact(t, part(spec)), []byte(host), []byte("$HOST"))
		}
		harness.Want(t, *update || got.Error == want.Error && bytes.Equal(got.Spec, want.Spec),
			"%s, case %d:\n got %s %s\nwant %s %s", name, i, got.Spec, got.Error, want.Spec, want.Error)
		*want = got
	}
	if *update {
		data, err := json.MarshalIndent(cases, "", "  ")
		must(t, err)
		must(t, os.WriteFile(filepath.Join("testdata", name+".json"), append(data, '\n'), 0o644))
	}
}

func readGolden(t *testing.T, name string) (cases []goldenCase) {
	decoder := json.NewDecoder(bytes.NewReader(harness.Read(t, filepath.Join("testdata", name+".json"))))
	decoder.DisallowUnknownFields()
	err := decoder.Decode(&cases)
	harness.Want(t, err == nil && len(cases) > 0, "%s: %d cases, %v", name, len(cases), err)
	for i, c := range cases {
		if len(c.Spec) > 0 {
			cases[i].Spec = compact(t, c.Spec)
		}
	}
	return cases
}

func compact(t *testing.T, value any) json.RawMessage {
	data, err := json.Marshal(value)
	must(t, err)
	return data
}

func goldenSandboxes(t *testing.T, name string, part func(*specs.Spec) any) {
	golden(t, name, part, func(t *testing.T, c goldenCase, _ string) (*specs.Spec, error) { return ForSandbox(sandboxOf(t, c)) })
}

func sandboxOf(t *testing.T, c goldenCase) *Sandbox {
	s := &Sandbox{
		ID: "4e5f", Config: &runtimeapi.PodSandboxConfig{}, Rootfs: "/var/lib/minicri/pause/rootfs",
		EmptyDir: "/var/lib/minicri/pause/empty", NetNS: c.NetNS, UserNS: c.UserNS, CgroupsPath: "/kubepods/minicri-4e5f",
		Machine: c.Machine,
	}
	unmarshal(t, c, "", c.Config, s.Config)
	return s
}

func goldenContainers(t *testing.T, name string, part func(*specs.Spec) any, makeSpec func(*Container) (*specs.Spec, error)) {
	golden(t, name, part, func(t *testing.T, c goldenCase, host string) (*specs.Spec, error) {
		return makeSpec(containerOf(t, c, host))
	})
}

// goldenRule runs one rule, on a spec in which nothing is set yet.
func goldenRule(t *testing.T, name string, rule func(*Container, *specs.Spec) error, part func(*specs.Spec) any) {
	goldenContainers(t, name, part, func(c *Container) (*specs.Spec, error) {
		spec := &specs.Spec{Process: &specs.Process{Capabilities: &specs.LinuxCapabilities{}}, Linux: &specs.Linux{}}
		return spec, rule(c, spec)
	})
}

func containerOf(t *testing.T, c goldenCase, host string) *Container {
	makeFiles(t, c.Files, host)
	in := func(name string) string { return filepath.Join(host, name) }
	content := func(name string) []byte {
		data, err := os.ReadFile(in(name))
		if !errors.Is(err, fs.ErrNotExist) {
			must(t, err)
		}
		return data
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(in("cdi")), cdi.WithAutoRefresh(false))
	must(t, err)
	container := &Container{
		ID: "c0de", SandboxID: "4e5f", Pod: &runtimeapi.PodSandboxConfig{}, Config: &runtimeapi.ContainerConfig{}, Image: c.Image,
		Rootfs: in("rootfs"), Passwd: content("rootfs/etc/passwd"), Group: content("rootfs/etc/group"), Hostname: "web-0",
		Files:      PodFiles{Hosts: in("pod/hosts"), Hostname: in("pod/hostname"), ResolvConf: in("pod/resolv.conf"), Shm: in("pod/shm")},
		Namespaces: c.Namespaces, VolumesDir: in("volumes"), ImageMounts: make(map[string]string),
		CgroupsPath: "/kubepods/minicri-c0de", PidsLimit: c.PidsLimit, CDI: cache, Machine: c.Machine,
	}
	for place, source := range c.ImageMounts {
		container.ImageMounts[place] = strings.ReplaceAll(source, "$HOST", host)
	}
	unmarshal(t, c, host, c.Pod, container.Pod)
	unmarshal(t, c, host, c.Config, container.Config)
	// A mount may have no source yet; the caller of the rules makes a directory.
	for _, m := range slices.Concat(volumeMounts(container), container.Config.GetMounts()) {
		if _, err := os.Lstat(m.GetHostPath()); m.GetHostPath() != "" && errors.Is(err, fs.ErrNotExist) {
			must(t, os.MkdirAll(m.GetHostPath(), 0o755))
		}
	}
	return container
}

func makeFiles(t *testing.T, files map[string]string, host string) {
	all := map[string]string{"rootfs": "/", "cdi": "/", "pod/hosts": "", "pod/hostname": "", "pod/resolv.conf": "", "pod/shm": "/"}
	maps.Copy(all, files)
	for name, content := range all {
		name = filepath.Join(host, name)
		must(t, os.MkdirAll(filepath.Dir(name), 0o755))
		if target, isLink := strings.CutPrefix(content, "-> "); isLink {
			must(t, os.Symlink(strings.ReplaceAll(target, "$HOST", host), name))
		} else if content == "/" {
			must(t, os.MkdirAll(name, 0o755))
		} else {
			must(t, os.WriteFile(name, []byte(content), 0o644))
		}
	}
}

func unmarshal(t *testing.T, c goldenCase, host string, text json.RawMessage, into proto.Message) {
	if len(text) == 0 {
		return
	}
	harness.Same(t, "case "+c.Case, protojson.Unmarshal(bytes.ReplaceAll(text, []byte("$HOST"), []byte(host)), into), nil)
}

const podLabel = "system_u:system_r:container_t:s0:c10,c20"

// cri: SELinuxOption.level SELinuxOption.role SELinuxOption.type SELinuxOption.user
// cri: LinuxSandboxSecurityContext.selinux_options
func TestSELinuxOptions(t *testing.T) {
	pod := SELinux{Process: podLabel}
	for _, test := range []struct {
		name       string
		options    *runtimeapi.SELinuxOption
		privileged bool
		want       []string
	}{
		{"the level of the pod", nil, false, []string{"level:s0:c10,c20"}},
		{"a level of its own", &runtimeapi.SELinuxOption{Level: "s0:c1,c2"}, false, []string{"level:s0:c1,c2"}},
		{"all of its own", &runtimeapi.SELinuxOption{User: "u", Role: "r", Type: "t", Level: "s0"}, false, []string{"user:u", "role:r", "type:t", "level:s0"}},
		{"privileged", nil, true, []string{"type:spc_t", "level:s0:c10,c20"}},
		{"privileged with a type of its own", &runtimeapi.SELinuxOption{Type: "t"}, true, []string{"type:t", "level:s0:c10,c20"}},
	} {
		config := &runtimeapi.ContainerConfig{Linux: &runtimeapi.LinuxContainerConfig{SecurityContext: &runtimeapi.LinuxContainerSecurityContext{
			SelinuxOptions: test.options, Privileged: test.privileged,
		}}}
		harness.Same(t, test.name, ContainerSELinux(config, pod), test.want)
		sandbox := &runtimeapi.PodSandboxConfig{Linux: &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
			SelinuxOptions: test.options, Privileged: test.privileged,
		}}}
		want := slices.DeleteFunc(slices.Clone(test.want), func(option string) bool { return option == "level:s0:c10,c20" })
		harness.Same(t, test.name+": of the pod", SandboxSELinux(sandbox), want)
	}
}

func TestSELinuxLevel(t *testing.T) {
	for label, want := range map[string]struct {
		level  string
		shared bool
	}{
		"":                                   {"", true},
		"system_u:system_r:container_t":      {"", true},
		"system_u:system_r:container_t:s0":   {"s0", true},
		podLabel:                             {"s0:c10,c20", false},
		"system_u:system_r:spc_t:s0:c10,c20": {"s0:c10,c20", true},
	} {
		got := SELinux{Process: label}
		harness.Want(t, got.Level() == want.level && got.Shared() == want.shared, "%q: level %q, shared %v, want %+v", label, got.Level(), got.Shared(), want)
	}
}

// The labels that were made for pause and for a container are in their specs.
func TestSELinuxOfSpecs(t *testing.T) {
	labels := SELinux{Process: podLabel, Mount: "system_u:object_r:container_file_t:s0:c10,c20"}
	pause, err := ForSandbox(&Sandbox{SELinux: labels})
	must(t, err)
	container, err := (&Container{SELinux: labels}).newSpec()
	must(t, err)
	for _, spec := range []*specs.Spec{pause, container} {
		harness.Want(t, spec.Process.SelinuxLabel == labels.Process && spec.Linux.MountLabel == labels.Mount,
			"process %q, mounts %q", spec.Process.SelinuxLabel, spec.Linux.MountLabel)
	}
}

func allows(profile *specs.LinuxSeccomp, name string) bool {
	return slices.ContainsFunc(profile.Syscalls, func(rule specs.LinuxSyscall) bool {
		return rule.Action == specs.ActAllow && len(rule.Args) == 0 && slices.Contains(rule.Names, name)
	})
}

// The default profile of a container allows what its capabilities are for.
func TestContainerSeccomp(t *testing.T) {
	profile := func(kind runtimeapi.SecurityProfile_ProfileType) *runtimeapi.LinuxContainerSecurityContext {
		return &runtimeapi.LinuxContainerSecurityContext{Seccomp: &runtimeapi.SecurityProfile{ProfileType: kind}}
	}
	strong := profile(runtimeapi.SecurityProfile_RuntimeDefault)
	strong.Capabilities = &runtimeapi.Capability{AddCapabilities: []string{"SYS_ADMIN"}}
	privileged := profile(runtimeapi.SecurityProfile_RuntimeDefault)
	privileged.Privileged = true
	for _, test := range []struct {
		name               string
		security           *runtimeapi.LinuxContainerSecurityContext
		confined, mayMount bool
	}{
		{"none", nil, false, false},
		{"default", profile(runtimeapi.SecurityProfile_RuntimeDefault), true, false},
		//lint:ignore SA1019 the older form is still sent
		{"default, the older form", &runtimeapi.LinuxContainerSecurityContext{SeccompProfilePath: "runtime/default"}, true, false},
		{"unconfined", profile(runtimeapi.SecurityProfile_Unconfined), false, false},
		{"default with CAP_SYS_ADMIN", strong, true, true},
		{"default, privileged", privileged, false, false},
	} {
		got := seccompOf(t, test.security).Linux.Seccomp
		if (got != nil) != test.confined {
			t.Errorf("%s: confined %v, want %v", test.name, got != nil, test.confined)
		} else if test.confined && (!allows(got, "execve") || allows(got, "mount") != test.mayMount) {
			t.Errorf("%s: mount allowed: %v, want %v", test.name, allows(got, "mount"), test.mayMount)
		}
	}
}

func seccompOf(t *testing.T, security *runtimeapi.LinuxContainerSecurityContext) *specs.Spec {
	c := &Container{
		Config:  &runtimeapi.ContainerConfig{Linux: &runtimeapi.LinuxContainerConfig{SecurityContext: security}},
		Machine: machine.Machine{Capabilities: append(DefaultCapabilities(), "CAP_SYS_ADMIN")},
	}
	spec := &specs.Spec{Process: &specs.Process{}, Linux: &specs.Linux{}}
	for _, rule := range []func(*Container, *specs.Spec) error{containerCapabilities, containerProfiles} {
		must(t, rule(c, spec))
	}
	return spec
}

// cri: LinuxContainerSecurityContext.seccomp_profile_path
func TestContainerSeccompFromFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "profile.json")
	must(t, os.WriteFile(file, []byte(`{"defaultAction":"SCMP_ACT_LOG"}`), 0o600))
	for _, security := range []*runtimeapi.LinuxContainerSecurityContext{
		{Seccomp: &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Localhost, LocalhostRef: file}},
		{SeccompProfilePath: "localhost/" + file},
	} {
		got := seccompOf(t, security).Linux.Seccomp
		harness.Want(t, got != nil && got.DefaultAction == specs.ActLog, "%v gives %v", security, got)
	}
}
