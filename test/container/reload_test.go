package container

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// A limit for the creation of containers that was long enough for a hook that hangs
// counts at once when it is shorter.
func TestReloadOfTheLimitOfCreate(t *testing.T) {
	n := newNode(t, harness.Config("[limits]\ncreate = '20m'\n"))
	p := runPod(t, n, "web")
	reloadLimit(t, n, "create", "5s")
	device := vendor(t, map[string]string{"createRuntime": "sleep 7774"}, 0)
	_, err := p.tryCreate(shell("app", "true", byField(device), func(c *runtimeapi.ContainerConfig) { c.LogPath = "" }))
	if err == nil || !strings.Contains(err.Error(), "create: not done within 5s") {
		t.Errorf("want an error that names the step and the limit: %v", err)
	}
}

// The limit of kill is also how long a supervisor may take to answer: one that hangs
// is ended after the new limit, not after that of the start.
func TestReloadOfTheLimitOfKill(t *testing.T) {
	n := newNode(t, harness.Config("[limits]\ndestroy = '30m'\nkill = '20m'\n"))
	p := runPod(t, n, "web")
	id := p.run("app", forever)
	reloadLimit(t, n, "kill", "5s")
	pid := shims(n)[0]
	check(t, unix.Kill(pid, unix.SIGSTOP))
	defer func() { _ = unix.Kill(pid, unix.SIGCONT) }()
	_, err := p.Runtime.ExecSync(limited(t), &runtimeapi.ExecSyncRequest{ContainerId: id, Cmd: []string{"true"}})
	wantCode(t, err, codes.Unavailable)
	p.awaitExecs(id)
}

// reloadLimit changes a limit of 20 minutes.
func reloadLimit(t *testing.T, n *harness.Node, key, value string) {
	t.Helper()
	file := filepath.Join(n.Dir, "config.toml")
	data, err := os.ReadFile(file)
	check(t, err)
	check(t, os.WriteFile(file, []byte(strings.Replace(string(data), key+" = '20m'", key+" = '"+value+"'", 1)), 0o600))
	check(t, syscall.Kill(n.PID(), syscall.SIGHUP))
	eventually(t, "it is reloaded", func() bool { return strings.Contains(n.Log(), "applied=[limits."+key+"]") })
}
