package e2e

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// Status says that pods can be made, and what this build and this kernel can do, of the
// runtime and of each handler; verbose, the network and the configuration in effect.
//
// cri: RuntimeCondition.status RuntimeCondition.type RuntimeStatus.conditions StatusResponse.info
// cri: StatusResponse.status StatusResponse.features RuntimeFeatures.supplemental_groups_policy
// cri: RuntimeFeatures.mount_options RuntimeHandler.features RuntimeHandlerFeatures.recursive_read_only_mounts
// cri: RuntimeHandlerFeatures.user_namespaces RuntimeHandler.name StatusResponse.runtime_handlers
// cri: LinuxRuntimeConfiguration.cgroup_driver RuntimeConfig RuntimeConfigResponse.linux
func TestStatusOfANode(t *testing.T) {
	n := newNode(t)
	answer, err := n.Runtime.Status(limited(t), &runtimeapi.StatusRequest{})
	check(t, err)
	found := map[string]bool{}
	for _, condition := range answer.Status.Conditions {
		found[condition.Type] = condition.Status
	}
	if f := answer.Features; !found[runtimeapi.RuntimeReady] || !found[runtimeapi.NetworkReady] || len(answer.Info) != 0 || !f.GetSupplementalGroupsPolicy() || !f.GetMountOptions() {
		t.Errorf("got %v", answer)
	}
	if len(answer.RuntimeHandlers) == 0 || answer.RuntimeHandlers[0].Name != "" {
		t.Errorf("the default handler is not listed: %v", answer.RuntimeHandlers)
	}
	for _, handler := range answer.RuntimeHandlers {
		// Both came to Linux before 5.19, and this test runs on nothing older.
		if f := handler.GetFeatures(); !f.GetRecursiveReadOnlyMounts() || !f.GetUserNamespaces() {
			t.Errorf("handler %q has the features %v", handler.GetName(), f)
		}
	}
	network, config := harness.Info[struct{ Name, File string }](t, n, "cniconfig"), harness.Info[map[string]any](t, n, "config")
	if network.Name != n.Network || network.File == "" || config["root"] != n.Root {
		t.Errorf("the network is %+v, the configuration %v", network, config)
	}
	info := statusInfo(t, n)
	for key, value := range info {
		// crictl shows an object as it is, and anything else as text with its quotes escaped.
		if !json.Valid([]byte(value)) || !strings.HasPrefix(value, "{") && key != "golang" && key != "config" {
			t.Errorf("info %s is no JSON object: %s", key, value)
		}
	}
	if _, hides := info["runtimeHandlers"]; hides {
		t.Error("info hides crictl's own list of runtimeHandlers")
	}
	driver, err := n.Runtime.RuntimeConfig(limited(t), &runtimeapi.RuntimeConfigRequest{})
	check(t, err)
	if strings.ToLower(driver.Linux.GetCgroupDriver().String()) != harness.CgroupDriver() {
		t.Errorf("got %v", driver)
	}
}

// A node that cannot make a pause is not ready, and says why; it is when it can.
//
// cri: RuntimeCondition.reason
func TestNotReadyUntilAPauseStarts(t *testing.T) {
	n := newNode(t)
	ready := func() *runtimeapi.RuntimeCondition {
		answer, err := n.Runtime.Status(limited(t), &runtimeapi.StatusRequest{})
		check(t, err)
		return answer.Status.Conditions[0]
	}
	n.Kill()
	// A tmpfs that is read-only has no place for what a pod has there.
	dir := filepath.Join(n.State, "sandboxes")
	check(t, unix.Mount("full", dir, "tmpfs", unix.MS_RDONLY, ""))
	n.Start()
	if c := ready(); c.Status || c.Type != runtimeapi.RuntimeReady || !strings.Contains(c.Message, "pause") || c.Reason == "" {
		t.Errorf("beside a directory that is read-only: %v", c)
	}
	check(t, unix.Unmount(dir, unix.MNT_DETACH))
	eventually(t, "a pause can be made again", patience, func() bool { return ready().Status })
	n.RemovePod(n.RunPod(n.PodConfig("web")))
}

func podCIDR(cidr string) *runtimeapi.UpdateRuntimeConfigRequest {
	return &runtimeapi.UpdateRuntimeConfigRequest{RuntimeConfig: &runtimeapi.RuntimeConfig{
		NetworkConfig: &runtimeapi.NetworkConfig{PodCidr: cidr},
	}}
}

// Checkpoints are refused, whatever is asked for, with the code by which the
// kubelet knows that they are not there; nothing is written.
//
// cri: CheckpointContainer CheckpointContainerRequest.container_id CheckpointContainerRequest.location
// cri: CheckpointContainerRequest.timeout CheckpointPod CheckpointPodRequest.container_ids CheckpointPodRequest.options
// cri: CheckpointPodRequest.output_path CheckpointPodRequest.pod_sandbox_id RestorePod RestorePodRequest.checkpoint_path
// cri: RestorePodRequest.config RestorePodRequest.container_configs RestorePodRequest.options
// cri: RestorePodRequest.runtime_handler
func TestWhatIsNotThereYetIsUnimplemented(t *testing.T) {
	n := harness.NewNode(t, harness.Parallel())
	pod, dir := n.RunPod(n.PodConfig("web")), t.TempDir()
	_, err := n.Runtime.CheckpointContainer(limited(t), &runtimeapi.CheckpointContainerRequest{ContainerId: pod, Location: filepath.Join(dir, "archive.tar"), Timeout: 10})
	wantCode(t, err, codes.Unimplemented)
	options := map[string]string{"leave-running": "true"}
	_, err = n.Runtime.CheckpointPod(limited(t), &runtimeapi.CheckpointPodRequest{PodSandboxId: pod, OutputPath: dir, ContainerIds: []string{pod}, Options: options})
	wantCode(t, err, codes.Unimplemented)
	_, err = n.Runtime.RestorePod(limited(t), &runtimeapi.RestorePodRequest{
		CheckpointPath: dir, Config: n.PodConfig("restored"), Options: options,
		ContainerConfigs: []*runtimeapi.ContainerConfig{{Metadata: &runtimeapi.ContainerMetadata{Name: "app"}}},
	})
	wantCode(t, err, codes.Unimplemented)
	_, err = n.Runtime.RestorePod(limited(t), &runtimeapi.RestorePodRequest{CheckpointPath: dir, Config: n.PodConfig("restored"), RuntimeHandler: "kata"})
	wantCode(t, err, codes.Unimplemented)
	pods, err := n.Runtime.ListPodSandbox(limited(t), &runtimeapi.ListPodSandboxRequest{})
	check(t, err)
	if written, err := os.ReadDir(dir); err != nil || len(written) > 0 || len(pods.Items) != 1 {
		t.Errorf("written: %v, %v; pods: %v", written, err, pods.Items)
	}
}
