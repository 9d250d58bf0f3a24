package container

import (
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// At the level info the log has a line for each thing that happened to a pod, with its
// name and its handler; a call that failed is an error, and names it too, and so does
// what the daemon notices by itself.
func TestLogSaysWhichPod(t *testing.T) {
	n := newNode(t, harness.LevelOfFile(), harness.Runtime("runc", runc(t)))
	p := runPod(t, n, "web", harness.HostNetwork())
	id := p.run("app", "exit 7")
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
	eventually(t, "the end of the container is logged", func() bool {
		return line("level=INFO", `"container ended"`, "container=app", "id="+id, "code=7", "reason=Error", "oom=false", "handler=runc")
	})
	if err := p.start(id); err == nil {
		t.Error("a container is started twice")
	}
	const absent = "127.0.0.1:1/absent:1"
	if _, err := n.Image.PullImage(limited(t), &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: absent}, SandboxConfig: p.config}); err == nil {
		t.Error("an image was pulled from nowhere")
	}
	if _, err := n.RunCommand("image", "pull", absent); err == nil || !strings.Contains(n.Log(), `level=ERROR msg="pull failed" by="minicri image pull" image=`+absent) {
		t.Errorf("minicri image pull: %v, and the log has\n%s", err, n.Log())
	}
	check(t, unix.Kill(p.pausePID(), unix.SIGKILL))
	eventually(t, "the end of pause is logged", func() bool {
		return line("level=WARN", `"the pause process ended by itself`, "sandbox="+p.id, "handler=runc")
	})
	n.RemovePod(p.id)
	for _, words := range [][]string{
		{"level=INFO", `"pod made"`, "sandbox=" + p.id},
		{"level=INFO", `"container started"`, "container=app", "image=", "handler=runc"},
		{"level=ERROR", "method=StartContainer", "container=app", "handler=runc"},
		{"level=ERROR", "method=PullImage", "image=" + absent},
		{"level=INFO", `"pod removed"`, "sandbox=" + p.id, "handler=runc"},
	} {
		if !line(words...) {
			t.Errorf("no line with %q in\n%s", words, n.Log())
		}
	}
}
