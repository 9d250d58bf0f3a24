package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Each malformed request is refused with the name of its field; that nothing
// stays is what the node's check is for.
//
// cri: LinuxPodSandboxConfig.sysctls LinuxSandboxSecurityContext.supplemental_groups_policy
// cri: NamespaceOption.pid
func TestMalformedRequests(t *testing.T) {
	n := newNode(t)
	type config = runtimeapi.PodSandboxConfig
	for field, change := range map[string]func(*config){
		"metadata.uid":               func(c *config) { c.Metadata.Uid = "a;b=c" },
		"log_directory":              func(c *config) { c.LogDirectory = n.Logs + "/../../x" },
		"namespace_options.pid":      func(c *config) { c.Linux.SecurityContext.NamespaceOptions.Pid = runtimeapi.NamespaceMode_TARGET },
		"supplemental_groups_policy": func(c *config) { c.Linux.SecurityContext.SupplementalGroupsPolicy = 7 },
		"sysctls[kernel.panic]":      func(c *config) { c.Linux.Sysctls = map[string]string{"kernel.panic": "1"} },
	} {
		bad := n.PodConfig("bad")
		change(bad)
		_, err := run(t, n, bad)
		wantCode(t, err, codes.InvalidArgument)
		if err != nil && !strings.Contains(err.Error(), strings.TrimSpace(field)) {
			t.Errorf("%s: the error does not name it: %v", field, err)
		}
	}
	_, err := n.Runtime.RunPodSandbox(limited(t), &runtimeapi.RunPodSandboxRequest{})
	wantCode(t, err, codes.InvalidArgument)
	_, err = n.Runtime.StopPodSandbox(limited(t), &runtimeapi.StopPodSandboxRequest{})
	wantCode(t, err, codes.InvalidArgument)
	if pods := list(t, n, nil); len(pods) != 0 {
		t.Errorf("listed: %v", pods)
	}
	// The daemon is as good as before.
	n.RunPod(n.PodConfig("good"))
}

// A pod in quarantine is no orphan where the quarantine cannot be read: the daemon does
// not start, and check --fix removes nothing.
func TestQuarantineThatCannotBeRead(t *testing.T) {
	n := newNode(t)
	id := n.RunPod(n.PodConfig("web"))
	pid := pausePID(t, n, id)
	record := filepath.Join(n.Root, "sandboxes", id+".json")
	whole, err := os.ReadFile(record)
	check(t, err)
	n.Kill()
	check(t, os.WriteFile(record, []byte("nonsense"), 0o600))
	n.Start()
	n.Kill()
	dir := filepath.Join(n.Root, "sandboxes", "quarantine")
	check(t, os.Rename(dir, dir+".away"))
	check(t, os.Symlink("quarantine", dir)) // ELOOP
	if err := n.TryStart(); err == nil || !strings.Contains(n.Log(), "quarantine") {
		t.Errorf("the daemon started: %v", err)
	}
	if output, err := n.RunCommand("check", "--fix"); err == nil || !strings.Contains(output, "quarantine") {
		t.Errorf("check: %v\n%s", err, output)
	}
	if !alive(pid) || len(addresses(t, n)) != 1 {
		t.Errorf("pause lives: %v, addresses %v", alive(pid), addresses(t, n))
	}
	check(t, os.Remove(dir))
	check(t, os.RemoveAll(dir+".away"))
	check(t, os.WriteFile(record, whole, 0o600))
	n.Start()
	if !ready(t, n, id) {
		t.Error("the pod is not Ready")
	}
}
