package container

import (
	"fmt"
	"os"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// before is the directory of a build of the last commit whose pods have a shim
// each, with the plugins beside it: hack/before makes it.
func before(t *testing.T) string {
	t.Helper()
	if !whole() {
		t.Skip("make test-supervisor builds an old commit for it")
	}
	dir := os.Getenv("MINICRI_TEST_BEFORE")
	if dir == "" {
		t.Fatal("MINICRI_TEST_BEFORE names no build of before: run make test-supervisor in a clone with the whole history")
	}
	return dir
}

// Pods of the last build that had a shim for each continue under their own shims when
// this build's daemon comes; new pods are the node's supervisor's.
func TestUpgradeFromAShimForEachPod(t *testing.T) {
	old := before(t)
	n := newNode(t) // what an idle node of this build has is not left behind
	n.Stop()
	n.SetBinaries(old)
	n.Start()
	var all []runs
	for i := range 4 {
		all = append(all, startRuns(t, n, i))
	}
	if now := shims(n); len(now) != len(all) {
		t.Errorf("%d pods of before have the shims %v", len(all), now)
	}
	n.Stop()
	n.SetBinaries(harness.BinDir(t))
	n.Start()
	for i, r := range all {
		r.wantUndisturbed(t, i)
	}
	if node, pods := n.Supervisors(); len(node) != 1 || len(pods) != len(all) {
		t.Errorf("supervisors: of the node %v, of pods %v", node, pods)
	}
	p := runPod(t, n, "new")
	id := p.run("app", forever)
	if _, pods := n.Supervisors(); len(pods) != len(all) {
		t.Errorf("supervisors of pods: %v", pods)
	}
	for i, r := range all[:2] {
		check(t, r.stop(r.lives, 20))
		r.wantExit(r.lives, 10, "Error")
		_, err := n.Runtime.RemovePodSandbox(limited(t), &runtimeapi.RemovePodSandboxRequest{PodSandboxId: r.id})
		check(t, err)
		eventually(t, "its shim ends with the pod", func() bool {
			_, pods := n.Supervisors()
			return len(pods) == len(all)-i-1
		})
	}
	back(t, n, old, all[2:], p, id)
}

// back goes back to the build of before, whose pods run on, and then to this one.
func back(t *testing.T, n *harness.Node, old string, left []runs, p *pod, id string) {
	t.Helper()
	// The build of before knows no supervisor of the node: docs/supervisor.md.
	check(t, p.stop(id, 1))
	_, err := n.Runtime.RemovePodSandbox(limited(t), &runtimeapi.RemovePodSandboxRequest{PodSandboxId: p.id})
	check(t, err)
	n.Stop()
	n.SetBinaries(old)
	n.Start()
	for i, r := range left {
		if now := r.info(r.lives).PID; now != r.pid || r.status(r.lives).State != running {
			t.Errorf("pod %d after the way back: pid %d, it was %d", i, now, r.pid)
		}
		same(t, "exec", r.exec(r.lives, "echo hi"), "hi")
	}
	n.Stop()
	n.SetBinaries(harness.BinDir(t))
	n.Start()
	for i, r := range left {
		same(t, fmt.Sprint("exec in pod ", i), r.exec(r.lives, "echo hi"), "hi")
		check(t, r.stop(r.lives, 20))
		r.wantExit(r.lives, 10, "Error")
	}
}
