package container

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

var wantsNull = &runtimeapi.ContainerConfig{CDIDevices: []*runtimeapi.CDIDevice{{Name: "vendor.example/null=0"}}}

// describe writes a CDI file of one device, whose containers get the variable.
func describe(t *testing.T, directory, variable string) {
	t.Helper()
	const text = `{"cdiVersion": "0.6.0", "kind": "vendor.example/null", "devices": [{"name": "0", "containerEdits": {
		"env": ["%s=yes"], "deviceNodes": [{"path": "/dev/vendor", "hostPath": "/dev/null"}]}}]}`
	if err := os.WriteFile(filepath.Join(directory, "vendor.json"), fmt.Appendf(nil, text, variable), 0o600); err != nil {
		t.Fatal(err)
	}
}

func variables(t *testing.T, files *cdiFiles) []string {
	t.Helper()
	devices, err := files.devices(wantsNull)
	if err != nil {
		t.Fatal(err)
	}
	spec := &specs.Spec{Process: &specs.Process{}}
	if _, err := devices.InjectDevices(spec, "vendor.example/null=0"); err != nil {
		t.Fatal(err)
	}
	if nodes := spec.Linux.Devices; len(nodes) != 1 || nodes[0].Major != 1 || nodes[0].Minor != 3 {
		t.Errorf("devices: %v", nodes)
	}
	return spec.Process.Env
}

// CDI files are parsed for containers that ask for a device, once for all of
// them, and again as soon as one has changed.
func TestCDIFilesAreParsedWhenTheyChange(t *testing.T) {
	files := &cdiFiles{directories: []string{t.TempDir(), "/no/such/directory"}}
	describe(t, files.directories[0], "FIRST")
	if devices, err := files.devices(&runtimeapi.ContainerConfig{}); err != nil || devices != nil || files.seen != nil {
		t.Errorf("a container that asks for nothing: %v, %v, files looked at: %v", devices, err, files.seen)
	}
	time.Sleep(2 * unsettled)
	for range 2 {
		if got := variables(t, files); len(got) != 1 || got[0] != "FIRST=yes" {
			t.Fatalf("environment %q", got)
		}
	}
	parsed := files.cache
	if variables(t, files); parsed == nil || files.cache != parsed {
		t.Error("files that did not change were parsed again")
	}
	for i := range 20 { // of one length, within one tick of the kernel's clock
		name := fmt.Sprintf("NEXT%02d", i)
		describe(t, files.directories[0], name)
		if got := variables(t, files); len(got) != 1 || got[0] != name+"=yes" {
			t.Fatalf("environment %q after the file has %s", got, name)
		}
	}
	if err := os.Remove(filepath.Join(files.directories[0], "vendor.json")); err != nil {
		t.Fatal(err)
	}
	devices, err := files.devices(wantsNull)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := devices.InjectDevices(&specs.Spec{}, "vendor.example/null=0"); err == nil {
		t.Error("a device that nothing describes any more was injected")
	}
}

// Containers that are made side by side share one parse.
func TestCDIDevicesSideBySide(t *testing.T) {
	files := &cdiFiles{directories: []string{t.TempDir()}}
	describe(t, files.directories[0], "SHARED")
	time.Sleep(2 * unsettled)
	var wait sync.WaitGroup
	for range 8 {
		wait.Go(func() { variables(t, files) })
	}
	wait.Wait()
}
