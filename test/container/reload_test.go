package container

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// A limit for the creation of containers that was long enough for a hook that hangs
// counts at once when it is shorter.
func TestReloadOfTheLimitOfCreate(t *testing.T) {
	n := newNode(t, harness.Config("[limits]\ncreate = '20m'\n"))
	p := runPod(t, n, "web")
	file := filepath.Join(n.Dir, "config.toml")
	data, err := os.ReadFile(file)
	check(t, err)
	check(t, os.WriteFile(file, []byte(strings.Replace(string(data), "create = '20m'", "create = '1s'", 1)), 0o600))
	check(t, syscall.Kill(n.PID(), syscall.SIGHUP))
	eventually(t, "it is reloaded", func() bool { return strings.Contains(n.Log(), "applied=[limits.create]") })
	device := vendor(t, map[string]string{"createRuntime": "sleep 7774"}, 0)
	_, err = p.tryCreate(shell("app", "true", byField(device), func(c *runtimeapi.ContainerConfig) { c.LogPath = "" }))
	if err == nil || !strings.Contains(err.Error(), "create: not done within 1s") {
		t.Errorf("want an error that names the step and the limit: %v", err)
	}
}
