package container

import (
	"os"
	"path/filepath"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/oci"
)

func TestMakeSources(t *testing.T) {
	host := t.TempDir()
	file := filepath.Join(host, "file")
	must(t, os.WriteFile(file, []byte("kept"), 0o600))
	c := &oci.Container{
		Config: &runtimeapi.ContainerConfig{Mounts: []*runtimeapi.Mount{
			{ContainerPath: "/f", HostPath: file},
			{ContainerPath: "/d", HostPath: filepath.Join(host, "made", "deep")},
			{ContainerPath: "/i", Image: &runtimeapi.ImageSpec{Image: "x"}},
		}},
	}
	for range 2 { // a second time changes nothing
		must(t, makeSources(c))
	}
	for _, dir := range []string{"made/deep"} {
		if info, err := os.Stat(filepath.Join(host, dir)); err != nil || !info.IsDir() {
			t.Errorf("%s: %v, %v", dir, info, err)
		}
	}
	if content, err := os.ReadFile(file); err != nil || string(content) != "kept" {
		t.Errorf("the file is %q, %v", content, err)
	}
	if err := relabel(c); err == nil {
		t.Error("the pod's files are missing, and there is no error")
	}
}

func TestMakeSourcesTellsTheMount(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	must(t, os.WriteFile(file, nil, 0o600))
	c := &oci.Container{Config: &runtimeapi.ContainerConfig{Mounts: []*runtimeapi.Mount{{ContainerPath: "/f", HostPath: file + "/below"}}}}
	if err := makeSources(c); err == nil {
		t.Error("a directory below a file has been made")
	}
}
