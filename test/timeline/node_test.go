package timeline

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
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
	credentials := filepath.Join(t.TempDir(), "docker.json")
	check(t, os.WriteFile(credentials, []byte(`{"auths": {"127.0.0.1:1": {"username": "me", "password": "S3CRET"}}}`), 0o600))
	n := newNode(t, harness.Config(fmt.Sprintf("default_env = ['EVERYWHERE=S3CRET']\n[images]\ndocker_config = '%s'\n%s", credentials, fast)))
	n.ImportBusybox()
	bridge := n.BridgePlugin()
	bridge["agent"] = harness.Object{"password": "S3CRET", "url": "https://me:S3CRET@agent.example/"}
	n.network(bridge)
	pod := n.PodConfig("web", func(c *runtimeapi.PodSandboxConfig) {
		c.Annotations = map[string]string{"vault.example/token": "S3CRET", "plain.example/text": "S3CRET"}
		c.Labels["key"] = "S3CRET"
	})
	id := n.RunPod(pod)
	request := n.container(pod, id, "app", harness.BusyboxImage, "sleep 1000000", 64<<20)
	request.Config.Args = []string{"--password=S3CRET"}
	request.Config.Annotations = map[string]string{"note": "S3CRET"}
	made, err := n.Runtime.CreateContainer(limited(t), request)
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
	for _, want := range []string{"test/web", "ready", "1/1", line.Addresses[0], "1 pod; daemon "} {
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
	for _, auth := range []*runtimeapi.AuthConfig{nil, {Username: "me", Password: "S3CRET"}, {RegistryToken: "S3CRET"}, {Auth: "bWU6UzNDUkVU"}} {
		_, err := n.Image.PullImage(limited(t), &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: "127.0.0.1:1/app:1", Annotations: map[string]string{"a": "S3CRET"}}, Auth: auth, SandboxConfig: pod})
		says(t, err, "connection refused")
	}
	bundle(t, n)
	all := n.text("web") + n.text("web", "--json") + n.text("--json") + text + table
	for _, secret := range secrets {
		if strings.Contains(all, secret) {
			t.Errorf("%s is shown", secret)
		}
	}
	if log := n.Log(); strings.Contains(log, "S3CRET") {
		t.Error("the log at level debug has a secret")
	}
}

// secrets are the word that is in every secret of the test, and its base64.
var secrets = []string{"S3CRET", "UzNDUkVU"}

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
		for _, secret := range secrets {
			if bytes.Contains(content, []byte(secret)) {
				t.Errorf("%s has a secret", header.Name)
			}
		}
		names = append(names, strings.TrimPrefix(header.Name, "minicri-debug/"))
	}
	for _, want := range []string{"version.txt", "config.json", "timelines.json", "pods.json", "goroutines.txt", "heap.pprof", "metrics.txt", "check.json", "networks/10-test.conflist.json", "machine-links.txt"} {
		if !slices.Contains(names, want) {
			t.Errorf("the bundle lacks %s: %q", want, names)
		}
	}
	if !slices.ContainsFunc(names, func(name string) bool { return strings.HasPrefix(name, "supervisors/") }) {
		t.Errorf("the bundle has no log of a supervisor: %q", names)
	}
}
