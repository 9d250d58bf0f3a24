package e2e

import (
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// Limits that were long enough for every plugin count at once when they are shorter:
// those of calls, of each verb, and of how long a pod's deletion is blocked.
func TestReloadOfLimits(t *testing.T) {
	const limits = `run = "20m"
destroy = "20m"
kill = "20m"
cni_add = "10m"
cni_del = "10m"
cni_check = "10m"
cni_status = "10m"
cni_gc = "10m"
detach_tries = 1000
detach_time = "10h"
`
	n := newNode(t, harness.NoNetwork(), harness.Config("[limits]\nreload = \"20ms\"\nretry_first = \"200ms\"\nretry_most = \"200ms\"\nstatus_period = \"1s\"\ncheck_period = \"1s\"\ngc_period = \"1s\"\n"+limits))
	r := newRecorder(t, n)
	n.WriteConflist("10-test.conflist", r.bridge("one"))
	inForce := limits
	reloadLimit := func(key, value string) {
		t.Helper()
		_, rest, _ := strings.Cut(inForce, key+" = ")
		old, _, _ := strings.Cut(rest, "\n")
		reload(t, n, key+" = "+old+"\n", key+" = "+value+"\n")
		inForce = strings.Replace(inForce, key+" = "+old, key+" = "+value, 1)
	}
	id := n.RunPod(n.PodConfig("web"))

	reloadLimit("cni_add", `"1s"`)
	r.order("one", "ADD", "hang")
	if _, err := run(t, n, n.PodConfig("hangs")); err == nil || !strings.Contains(err.Error(), "not done after 1s") {
		t.Errorf("cni_add: %v", err)
	}
	// The limit of the call begins before that of its ADD.
	reloadLimit("run", `"1s"`)
	if _, err := run(t, n, n.PodConfig("hangs")); err == nil || !strings.Contains(err.Error(), "not done within 1s") {
		t.Errorf("run: %v", err)
	}
	r.order("one", "ADD", "")
	reloadLimit("run", `"20m"`)
	reloadLimit("cni_add", `"10m"`)

	for verb, key := range map[string]string{"CHECK": "cni_check", "STATUS": "cni_status", "GC": "cni_gc"} {
		reloadLimit(key, `"1s"`)
		r.order("one", verb, "hang")
		eventually(t, verb+" is ended", patience, func() bool {
			for line := range strings.Lines(n.Log()) {
				if strings.Contains(line, "not done after 1s") && strings.Contains(line, verb) {
					return true
				}
			}
			return false
		})
		r.order("one", verb, "")
		reloadLimit(key, `"10m"`)
	}

	r.order("one", "DEL", "hang")
	reloadLimit("cni_del", `"1s"`)
	if err := stop(t, n, id); err == nil || !strings.Contains(err.Error(), "not done after 1s") {
		t.Errorf("cni_del: %v", err)
	}
	reloadLimit("kill", `"1s"`)
	reloadLimit("destroy", `"1s"`)
	if err := stop(t, n, id); err == nil || !strings.Contains(err.Error(), "not done within 1s") {
		t.Errorf("destroy: %v", err)
	}
	r.order("one", "DEL", "fail 11 not now")
	for _, key := range []string{"destroy", "kill", "cni_del"} {
		reloadLimit(key, `"10m"`)
	}
	eventually(t, "a DEL that fails blocks the deletion", patience, func() bool {
		err := stop(t, n, id) // the first may wait for a retry that hangs
		return err != nil && strings.Contains(err.Error(), "not now")
	})
	reloadLimit("detach_time", `"1ms"`)
	eventually(t, "the deletion is not blocked", patience, func() bool { return stop(t, n, id) == nil })

	second := n.PodConfig("second")
	answer, err := n.Runtime.RunPodSandbox(limited(t), &runtimeapi.RunPodSandboxRequest{Config: second})
	check(t, err)
	reloadLimit("detach_time", `"10h"`)
	if err := stop(t, n, answer.PodSandboxId); err == nil {
		t.Error("the deletion is not blocked any more")
	}
	reloadLimit("detach_tries", "1")
	eventually(t, "the deletion is not blocked", patience, func() bool { return stop(t, n, answer.PodSandboxId) == nil })
	r.order("one", "DEL", "")
	eventually(t, "the addresses are free", patience, func() bool { return len(addresses(t, n)) == 0 })
}
