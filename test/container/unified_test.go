//go:build vm

package container

import (
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// What is asked for by the name of a file of cgroup v2 is written to it, at the
// creation and by an update, which keeps the other keys.
//
// cri: LinuxContainerResources.unified
func TestUnified(t *testing.T) {
	p, _ := newSlicedPod(t)
	id := p.run("app", forever, func(c *runtimeapi.ContainerConfig) {
		c.Linux.Resources.Unified = map[string]string{"memory.high": "67108864", "pids.max": "50"}
	})
	path := p.info(id).CgroupsPath
	same(t, "memory.high", file(t, path, "memory.high"), "67108864")
	same(t, "pids.max", file(t, path, "pids.max"), "50")
	check(t, p.update(id, &runtimeapi.LinuxContainerResources{Unified: map[string]string{"memory.high": "33554432"}}))
	same(t, "memory.high after the update", file(t, path, "memory.high"), "33554432")
	same(t, "pids.max after the update", file(t, path, "pids.max"), "50")
	if unified := p.status(id).Resources.GetLinux().GetUnified(); unified["memory.high"] != "33554432" || unified["pids.max"] != "50" {
		t.Errorf("the status says %v", unified)
	}
}
