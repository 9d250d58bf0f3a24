package container

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// cri: ContainerConfig.log_path
func TestP59_NothingRunsAfterRemove(t *testing.T) {
	p := newPod(t)
	for _, script := range []string{deaf, forever, "(while true; do (sleep 1000 &) ; sleep 0.001; done) & sleep 1000"} {
		id := p.run("app", script, noLog)
		cgroup := p.info(id).CgroupsPath
		eventually(t, "it has a child", func() bool { return len(p.pidsInCgroup(cgroup)) > 1 })
		check(t, p.remove(id))
		if left := p.inCgroup(cgroup); len(left) != 0 {
			t.Errorf("%q: left: %v", script, left)
		}
	}
	check(t, p.remove(p.create(shell("app", "true"))))
	if pids := shims(p.Node); len(pids) != 1 {
		t.Errorf("shims: %v", pids)
	}
	p.RemovePod(p.id)
}

// A pod that has ended costs nothing: after StopPodSandbox nothing of it is in
// a supervisor, and no descriptor or thread for it.
func TestEndedPodsCostNothing(t *testing.T) {
	p := newPod(t)
	p.wantExit(p.run("warm", "true"), 0, "Completed")
	before := entries(p.Node, "fd")
	pods := 10
	if whole() {
		pods = 200
	}
	for i := range pods {
		ended := runPod(t, p.Node, fmt.Sprint("ended-", i))
		ended.wantExit(ended.run("app", "exit 3"), 3, "Error")
		check(t, ended.stopPod())
	}
	eventually(t, "descriptors, threads and shims are as before", func() bool {
		return entries(p.Node, "fd") <= before && len(shims(p.Node)) == 1 && entries(p.Node, "task") <= 24
	})
}

// entries counts those that the supervisors have in a directory of /proc/PID.
func entries(n *harness.Node, dir string) (count int) {
	for _, pid := range shims(n) {
		found, _ := os.ReadDir(fmt.Sprintf("/proc/%d/%s", pid, dir)) // it may have ended
		count += len(found)
	}
	return count
}

// cri: RemovePodSandboxRequest.pod_sandbox_id
func TestPodStopsItsContainers(t *testing.T) {
	p := newPod(t)
	ids := []string{p.run("deaf", deaf), p.run("app", forever), p.create(shell("waits", "true")), p.run("ended", "true")}
	check(t, p.inTime(20*time.Second, p.stopPod))
	for _, id := range ids {
		if s := p.status(id); s.State != exited || s.FinishedAt == 0 {
			t.Errorf("in a pod that was stopped: %v", s)
		}
		if left := p.inCgroup(p.info(id).CgroupsPath); len(left) != 0 {
			t.Errorf("left: %v", left)
		}
	}
	check(t, p.removePod())
	if left := p.list(nil); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

// Anyone who stops a pod while containers are being made in it leaves none behind.
//
// cri: Container.state ContainerFilter.pod_sandbox_id
func TestPodIsStoppedWhileContainersAreMade(t *testing.T) {
	n := newNode(t)
	for round := range 5 {
		p := runPod(t, n, "web", harness.Attempt(uint32(round)))
		done := make(chan struct{})
		go func() {
			defer close(done)
			for i := range 4 {
				if id, err := p.tryCreate(shell("app", forever, attempt(uint32(i)))); err == nil {
					_ = p.start(id) // the pod may be stopped by now
				}
			}
		}()
		time.Sleep(time.Duration(round) * 30 * time.Millisecond)
		check(t, p.stopPod())
		for _, c := range p.list(&runtimeapi.ContainerFilter{PodSandboxId: p.id}) {
			if c.State != exited {
				t.Errorf("in a pod that was stopped: %v", c)
			}
		}
		<-done
		p.RemovePod(p.id)
	}
}

// cri: Container.id ContainerFilter.state ContainerStateValue.state CreateContainerRequest.config
// cri: CreateContainerRequest.pod_sandbox_id CreateContainerRequest.sandbox_config
// cri: CreateContainerResponse.container_id
func TestP61_ClientThatGoesAway(t *testing.T) {
	p := newPod(t)
	other := p.run("other", quiet)
	eventually(t, "the other one runs", func() bool { return harness.ProcStatus(t, p.info(other).PID, "Name") == "sleep" })
	before := p.Look()
	config := shell("app", forever, noLog)
	for i := range 25 {
		ctx, cancel := context.WithTimeout(limited(t), time.Duration(i)*4*time.Millisecond)
		answer, err := p.Runtime.CreateContainer(ctx, &runtimeapi.CreateContainerRequest{PodSandboxId: p.id, Config: config, SandboxConfig: p.config})
		cancel()
		if err == nil {
			check(t, p.remove(answer.ContainerId))
		}
	}
	// One that was finished as its caller left is listed.
	eventually(t, "what was made is listed, or gone", func() bool {
		for _, c := range p.list(&runtimeapi.ContainerFilter{State: &runtimeapi.ContainerStateValue{State: created}}) {
			check(t, p.remove(c.Id))
		}
		id, err := p.tryCreate(config)
		return err == nil && p.remove(id) == nil
	})
	for _, left := range p.Differences(before) {
		t.Error(left)
	}
}
