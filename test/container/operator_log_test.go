package container

import (
	"strings"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

// At the level info the log has a line for each thing that happened to a pod, with its
// name; a call that failed is an error, and names it too.
func TestLogSaysWhichPod(t *testing.T) {
	n := newNode(t, harness.LevelOfFile())
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
		return line("level=INFO", `"container ended"`, "container=app", "id="+id, "code=7", "reason=Error", "oom=false")
	})
	if err := p.start(id); err == nil {
		t.Error("a container is started twice")
	}
	n.RemovePod(p.id)
	for _, words := range [][]string{
		{"level=INFO", `"pod made"`, "sandbox=" + p.id},
		{"level=INFO", `"container started"`, "container=app", "image="},
		{"level=ERROR", "method=StartContainer", "container=app"},
		{"level=INFO", `"pod removed"`, "sandbox=" + p.id},
	} {
		if !line(words...) {
			t.Errorf("no line with %q in\n%s", words, n.Log())
		}
	}
}
