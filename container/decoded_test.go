package container

import (
	"encoding/json"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Resources and user are those of the facts, whenever they are replaced.
func TestDecodedFollowsTheFacts(t *testing.T) {
	c := newContainer(Record{ID: "a"}, &runtimeapi.ContainerConfig{})
	if got := c.Resources(); got != nil {
		t.Errorf("resources of no facts: %v", got)
	}
	for _, shares := range []string{"2", "2", "1024"} {
		c.update(func(f *Facts) { f.Resources = json.RawMessage(`{"cpuShares":"` + shares + `"}`) })
		if got, want := c.Resources().GetCpuShares(), map[string]int64{"2": 2, "1024": 1024}[shares]; got != want {
			t.Errorf("%d shares, want %d", got, want)
		}
	}
	c.update(func(f *Facts) { f.User = json.RawMessage(`no JSON`) })
	if got := c.User(); got != nil {
		t.Errorf("the user of what is no JSON: %v", got)
	}
}
