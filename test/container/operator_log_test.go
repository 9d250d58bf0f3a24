package container

import (
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// At the level info the log has a line for each thing that happened to a pod, with its
// name; a call that failed is an error, and names it too.
func TestLogSaysWhichPod(t *testing.T) {
	n := newNode(t, harness.LevelOfFile())
	n.ImportBusybox()
	config := n.PodConfig("web", harness.HostNetwork())
	pod := n.RunPod(config)
	create := func(name string, command ...string) (string, error) {
		answer, err := n.Runtime.CreateContainer(t.Context(), &runtimeapi.CreateContainerRequest{PodSandboxId: pod, SandboxConfig: config, Config: &runtimeapi.ContainerConfig{
			Metadata: &runtimeapi.ContainerMetadata{Name: name}, Image: &runtimeapi.ImageSpec{Image: harness.BusyboxImage}, Command: command, LogPath: name + ".log",
		}})
		return answer.GetContainerId(), err
	}
	id, err := create("app", "sh", "-c", "exit 7")
	harness.Check(t, err)
	_, err = n.Runtime.StartContainer(t.Context(), &runtimeapi.StartContainerRequest{ContainerId: id})
	harness.Check(t, err)
	line := func(words ...string) bool {
		for line := range strings.Lines(n.Log()) {
			all := strings.Contains(line, "namespace=test pod=web")
			for _, word := range words {
				all = all && strings.Contains(line, word)
			}
			if all {
				return true
			}
		}
		return false
	}
	harness.Eventually(t, "the end of the container is logged", patience, func() bool {
		return line("level=INFO", `"container ended"`, "container=app", "id="+id, "code=7", "reason=Error", "oom=false")
	})
	if _, err := n.Runtime.StartContainer(t.Context(), &runtimeapi.StartContainerRequest{ContainerId: id}); err == nil {
		t.Error("a container is started twice")
	}
	n.RemovePod(pod)
	for _, words := range [][]string{
		{"level=INFO", `"pod made"`, "sandbox=" + pod},
		{"level=INFO", `"container started"`, "container=app", "image="},
		{"level=ERROR", "method=StartContainer", "container=app"},
		{"level=INFO", `"pod removed"`, "sandbox=" + pod},
	} {
		if !line(words...) {
			t.Errorf("no line with %q in\n%s", words, n.Log())
		}
	}
}
