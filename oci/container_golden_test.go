package oci

import (
	"bytes"
	"encoding/json"
	"errors"
	"io/fs"
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
)

// containerCase is one entry of a golden file for containers. $HOST stands for
// a directory of the test's own, in what is given and in what is made.
type containerCase struct {
	Case string `json:"case"`
	// Pod is a PodSandboxConfig, Config a ContainerConfig.
	Pod    json.RawMessage `json:"pod,omitempty"`
	Config json.RawMessage `json:"config"`
	// Files are made below $HOST: text, a directory if it is "/", or a link if
	// it begins with "-> ". The rootfs is $HOST/rootfs.
	Files       map[string]string `json:"files,omitempty"`
	Image       Image             `json:"image,omitzero"`
	ImageMounts map[string]string `json:"imageMounts,omitempty"`
	Namespaces  Namespaces        `json:"namespaces,omitzero"`
	PidsLimit   int64             `json:"pidsLimit,omitempty"`
	Machine     machine.Machine   `json:"machine,omitzero"`
	outcome
}

// goldenContainer runs a rule over the cases of testdata/NAME.json, each on a
// spec in which nothing is set yet, and compares the part that it is to set.
func goldenContainer(t *testing.T, name string, rule func(*Container, *specs.Spec) error, part func(*specs.Spec) any) {
	t.Helper()
	goldenContainers(t, name, part, func(c *Container) (*specs.Spec, error) {
		spec := &specs.Spec{Process: &specs.Process{Capabilities: &specs.LinuxCapabilities{}}, Linux: &specs.Linux{}}
		return spec, rule(c, spec)
	})
}

func goldenContainers(t *testing.T, name string, part func(*specs.Spec) any, makeSpec func(*Container) (*specs.Spec, error)) {
	t.Helper()
	goldenFile(t, name, func(c *containerCase) outcome {
		host := t.TempDir()
		container := containerOf(t, c, host)
		for _, source := range slices.Concat(volumeMounts(container), container.Config.GetMounts()) {
			makeMissing(t, source.GetHostPath())
		}
		spec, err := makeSpec(container)
		made := outcomeOf(t, spec, err, part)
		made.Error = strings.ReplaceAll(made.Error, host, "$HOST")
		made.Spec = bytes.ReplaceAll(made.Spec, []byte(host), []byte("$HOST"))
		return made
	})
}

func containerOf(t *testing.T, c *containerCase, host string) *Container {
	t.Helper()
	makeFiles(t, c.Files, host)
	container := &Container{
		ID:          "c0de",
		SandboxID:   "4e5f",
		Pod:         &runtimeapi.PodSandboxConfig{},
		Config:      &runtimeapi.ContainerConfig{},
		Image:       c.Image,
		Rootfs:      filepath.Join(host, "rootfs"),
		Passwd:      contentOf(t, filepath.Join(host, "rootfs/etc/passwd")),
		Group:       contentOf(t, filepath.Join(host, "rootfs/etc/group")),
		Hostname:    "web-0",
		Files:       podFilesIn(host),
		Namespaces:  c.Namespaces,
		VolumesDir:  filepath.Join(host, "volumes"),
		ImageMounts: make(map[string]string),
		CgroupsPath: "/kubepods/minicri-c0de",
		PidsLimit:   c.PidsLimit,
		CDI:         cdiCache(t, filepath.Join(host, "cdi")),
		Machine:     c.Machine,
	}
	for place, source := range c.ImageMounts {
		container.ImageMounts[place] = strings.ReplaceAll(source, "$HOST", host)
	}
	unmarshal(t, c.Case, host, c.Pod, container.Pod)
	unmarshal(t, c.Case, host, c.Config, container.Config)
	return container
}

// podFilesIn are files that every case has.
func podFilesIn(host string) PodFiles {
	pod := func(name string) string { return filepath.Join(host, "pod", name) }
	return PodFiles{Hosts: pod("hosts"), Hostname: pod("hostname"), ResolvConf: pod("resolv.conf"), Shm: pod("shm")}
}

func makeFiles(t *testing.T, files map[string]string, host string) {
	t.Helper()
	all := map[string]string{"rootfs": "/", "cdi": "/", "pod/hosts": "", "pod/hostname": "", "pod/resolv.conf": "", "pod/shm": "/"}
	for name, content := range files {
		all[name] = content
	}
	for name, content := range all {
		name = filepath.Join(host, name)
		err := os.MkdirAll(filepath.Dir(name), 0o755)
		if target, isLink := strings.CutPrefix(content, "-> "); err == nil && isLink {
			err = os.Symlink(strings.ReplaceAll(target, "$HOST", host), name)
		} else if err == nil && content == "/" {
			err = os.MkdirAll(name, 0o755)
		} else if err == nil {
			err = os.WriteFile(name, []byte(content), 0o644)
		}
		must(t, err)
	}
}

// makeMissing makes a directory where a mount has no source yet, as the caller
// of the rules does.
func makeMissing(t *testing.T, source string) {
	t.Helper()
	_, err := os.Lstat(source)
	if source != "" && errors.Is(err, fs.ErrNotExist) {
		err = os.MkdirAll(source, 0o755)
	}
	if source != "" && err != nil {
		t.Fatal(err)
	}
}

func contentOf(t *testing.T, file string) []byte {
	t.Helper()
	content, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return content
}

func cdiCache(t *testing.T, dir string) *cdi.Cache {
	t.Helper()
	cache, err := cdi.NewCache(cdi.WithSpecDirs(dir), cdi.WithAutoRefresh(false))
	must(t, err)
	return cache
}

func unmarshal(t *testing.T, name, host string, text json.RawMessage, into proto.Message) {
	t.Helper()
	if len(text) == 0 {
		return
	}
	if err := protojson.Unmarshal(bytes.ReplaceAll(text, []byte("$HOST"), []byte(host)), into); err != nil {
		t.Fatalf("case %q: %v", name, err)
	}
}
