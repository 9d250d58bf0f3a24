package e2e

import (
	"strings"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

// Limits that were long enough for every plugin count at once when they are shorter:
// those of calls, of each verb, and of how long a pod's deletion is blocked.
func TestReloadOfLimits(t *testing.T) {
	limits := map[string]string{
		"run": "'20m'", "destroy": "'20m'", "kill": "'20m'", "cni_add": "'10m'", "cni_del": "'10m'", "cni_check": "'10m'", "cni_status": "'10m'", "cni_gc": "'10m'",
		"detach_tries": "1000", "detach_time": "'10h'", "retry_first": "'200ms'", "retry_most": "'200ms'", "status_period": "'1s'", "check_period": "'1s'", "gc_period": "'1s'", "reload": "'20ms'",
	}
	text := "[limits]\n"
	for key, value := range limits {
		text += key + " = " + value + "\n"
	}
	n := newNode(t, harness.NoNetwork(), harness.Config(text))
	r := newRecorder(t, n)
	n.WriteConflist("10-test.conflist", r.bridge("one"))
	set := func(key, value string) {
		t.Helper()
		reload(t, n, key+" = "+limits[key]+"\n", key+" = "+value+"\n")
		limits[key] = value
	}
	refused := func(what string, err error, says string) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", what, err)
		}
	}
	id := n.RunPod(n.PodConfig("web"))

	set("cni_add", "'1s'")
	r.order("one", "ADD", "hang")
	_, err := run(t, n, n.PodConfig("hangs"))
	refused("cni_add", err, "not done after 1s")
	set("run", "'1s'") // which begins before the limit of its ADD
	_, err = run(t, n, n.PodConfig("hangs"))
	refused("run", err, "not done within 1s")
	r.order("one", "ADD", "")

	for verb, key := range map[string]string{"CHECK": "cni_check", "STATUS": "cni_status", "GC": "cni_gc"} {
		set(key, "'1s'")
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
	}

	r.order("one", "DEL", "hang")
	set("cni_del", "'1s'")
	refused("cni_del", stop(t, n, id), "not done after 1s")
	set("kill", "'1s'")
	set("destroy", "'1s'")
	refused("destroy", stop(t, n, id), "not done within 1s")
	r.order("one", "DEL", "fail 11 not now")
	for _, key := range []string{"destroy", "kill", "cni_del"} {
		set(key, "'10m'")
	}
	eventually(t, "a DEL that fails blocks the deletion", patience, func() bool {
		err := stop(t, n, id) // the first may wait for a retry that hangs
		return err != nil && strings.Contains(err.Error(), "not now")
	})
	set("detach_tries", "1")
	eventually(t, "the deletion is not blocked", patience, func() bool { return stop(t, n, id) == nil })
	r.order("one", "DEL", "")
	eventually(t, "the addresses are free", patience, func() bool { return len(addresses(t, n)) == 0 })
}
