package timeline

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/timeline"
	"github.com/minicri/minicri/test/harness"
)

// The node at a glance, the list of lives, and what a maintainer gets.
func TestNodeAtAGlance(t *testing.T) {
	n := newNode(t, harness.Config("default_env = ['EVERYWHERE=S3CRET']\n"))
	n.ImportBusybox()
	pod := n.PodConfig("web")
	id := n.RunPod(pod)
	made, err := n.Runtime.CreateContainer(limited(t), n.container(pod, id, "app", harness.BusyboxImage, "sleep 1000000", 64<<20))
	check(t, err)
	_, err = n.Runtime.StartContainer(limited(t), &runtimeapi.StartContainerRequest{ContainerId: made.ContainerId})
	check(t, err)

	var glance timeline.Glance
	text, err := n.RunCommand("pods", "--json")
	check(t, err)
	check(t, json.Unmarshal([]byte(text), &glance))
	if len(glance.Pods) != 1 || glance.Daemon < 1<<20 {
		t.Fatalf("%s", text)
	}
	line := glance.Pods[0]
	if line.Name != "test/web" || line.State != timeline.Ready || line.Running != 1 || line.Containers != 1 || len(line.Addresses) != 1 || line.Memory == 0 || line.Runtime == 0 {
		t.Errorf("%+v", line)
	}
	table, err := n.RunCommand("pods")
	check(t, err)
	for _, want := range []string{"test/web", "ready", "1/1", line.Addresses[0], "1 pods; daemon "} {
		if !strings.Contains(table, want) {
			t.Errorf("the table lacks %q:\n%s", want, table)
		}
	}

	info, err := os.Stat(filepath.Join(n.State, "debug.sock"))
	check(t, err)
	if info.Mode().Perm() != 0o600 {
		t.Errorf("the socket has mode %v", info.Mode())
	}
	if list := n.text(); !strings.Contains(list, "test/web") || !strings.Contains(list, "ready") {
		t.Errorf("the list:\n%s", list)
	}
	if failed := n.json("--failed"); len(failed) != 0 {
		t.Errorf("failed: %+v", failed)
	}
	n.fails(n.PodConfig("bad", func(c *runtimeapi.PodSandboxConfig) {
		c.Linux.Sysctls = map[string]string{"no.such.thing": "1"}
	}))
	if failed := n.json("--failed", "--since", "1h"); len(failed) != 1 || failed[0].Name != "test/bad" {
		t.Errorf("failed: %+v", failed)
	}
	if slowest := n.json("--slowest", "1"); len(slowest) != 1 || slowest[0].Name != "test/web" {
		t.Errorf("slowest: %+v", slowest)
	}
	bundle(t, n)
}

// bundle: every part is there, and no secret.
func bundle(t *testing.T, n node) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "bundle.tar.gz")
	_, err := n.RunCommand("debug", "bundle", file)
	check(t, err)
	data, err := os.ReadFile(file)
	check(t, err)
	packed, err := gzip.NewReader(bytes.NewReader(data))
	check(t, err)
	var names []string
	for archive := tar.NewReader(packed); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		check(t, err)
		content, err := io.ReadAll(archive)
		check(t, err)
		if bytes.Contains(content, []byte("S3CRET")) {
			t.Errorf("%s has a secret", header.Name)
		}
		names = append(names, strings.TrimPrefix(header.Name, "minicri-debug/"))
	}
	for _, want := range []string{"version.txt", "config.json", "timelines.json", "pods.json", "goroutines.txt", "heap.pprof", "metrics.txt", "check.json", "networks/10-test.conflist.json", "machine-links.txt"} {
		if !slices.Contains(names, want) {
			t.Errorf("the bundle lacks %s: %q", want, names)
		}
	}
}
