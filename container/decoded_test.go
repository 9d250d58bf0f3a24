package container

import (
	"encoding/json"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// A message is decoded once for as long as the facts are the same, and again when
// they have been replaced, by the same text or another one.
func TestDecodedFollowsTheFacts(t *testing.T) {
	c := newContainer(Record{ID: "a"}, &runtimeapi.ContainerConfig{})
	if got := c.Resources(); got != nil {
		t.Errorf("resources of no facts: %v", got)
	}
	for _, shares := range []string{"2", "2", "1024"} {
		c.update(func(f *Facts) { f.Resources = json.RawMessage(`{"cpuShares":"` + shares + `"}`) })
		first := c.Resources()
		if got, want := first.GetCpuShares(), map[string]int64{"2": 2, "1024": 1024}[shares]; got != want {
			t.Errorf("%d shares, want %d", got, want)
		}
		c.update(func(f *Facts) { f.StartedAt++ })
		if c.Resources() != first {
			t.Error("decoded again, though nothing has changed")
		}
	}
	c.update(func(f *Facts) { f.User = json.RawMessage(`no JSON`) })
	if got := c.User(); got != nil {
		t.Errorf("the user of what is no JSON: %v", got)
	}
}
