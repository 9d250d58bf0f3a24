package container

import (
	"slices"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// The containers of a pod are found without a look at those of others, the newest
// first, in whatever order they became known.
func TestContainersOfAPod(t *testing.T) {
	s := &Store{byID: make(map[string]*Container), byName: make(map[string]*Container), byPod: make(map[string][]*Container)}
	made := make(map[string]*Container)
	for id, at := range map[string]int64{"old": 1, "middle": 2, "new": 3, "elsewhere": 4} {
		pod := "pod"
		if id == "elsewhere" {
			pod = "other"
		}
		made[id] = newContainer(Record{ID: id, SandboxID: pod, CreatedAt: at}, &runtimeapi.ContainerConfig{})
		made[id].listed.Store(id != "middle")
		s.add(made[id])
	}
	ids := func(list []*Container) (ids []string) {
		for _, c := range list {
			ids = append(ids, c.ID)
		}
		return ids
	}
	if got := ids(s.OfPod("pod")); !slices.Equal(got, []string{"new", "middle", "old"}) {
		t.Errorf("OfPod: %v", got)
	}
	if got := ids(s.ListPod("pod")); !slices.Equal(got, []string{"new", "old"}) {
		t.Errorf("ListPod: %v", got)
	}
	for _, id := range []string{"middle", "new", "old"} {
		s.forget(made[id])
	}
	if len(s.byPod) != 1 || len(s.OfPod("pod")) != 0 {
		t.Errorf("after all of a pod were removed: %v", s.byPod)
	}
}
