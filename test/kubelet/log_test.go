package kubelet

import (
	"regexp"
	"slices"
	"strings"

	"github.com/minicri/minicri/test/harness"
)

// runtimeError is a line of klog's, at the level Error or above, that is about the runtime: what it answered, or what
// became of a pod that it should run. Others are about the machine, or about what a kubelet without an API server
// lacks.
var runtimeError = regexp.MustCompile(`^[EF][0-9]{4} .*(rpc error|[Rr]untime|PLEG|[Ss]andbox|[Ii]mage|pod_workers|prober)`)

// harmless are complaints that are no errors of a runtime, each with its reason.
var harmless = []struct{ text, why string }{
	{"container runtime status check may not have completed yet", "the kubelet has just started"},
	{"PLEG is not healthy: pleg has yet to be successful", "the same, a moment later"},
	{"no imagefs label for configured runtime", "cAdvisor knows other runtimes by name"},
	{"Missing actuated pod level resource record", "the kubelet's own notes about a pod whose start was interrupted"},
	{"code = Canceled desc = context canceled", "the kubelet gives up its own probe when the pod is deleted"},
	{"code = NotFound", "the kubelet asks again for what it has just removed"},
}

// down are the complaints of the time without a daemon. The error of a call that was under way when it was killed
// comes without its code in some places: the texts are gRPC's for a connection that is gone.
var down = regexp.MustCompile("code = Unavailable|container runtime is down|PLEG is not healthy|" +
	"error reading from server|connection error: desc|closing transport|connection reset by peer|broken pipe")

// markLog remembers where the kubelet's log ends now: it is called twice around the time in which there is no daemon.
func (k *kubelet) markLog() { k.marks = append(k.marks, len(k.log())) }

func (k *kubelet) log() string { return string(harness.Read(k.t, k.path("log"))) }

// checkLog fails the test for every error of the runtime's in the kubelet's log,
// and for settings of the machine that it changed.
func (k *kubelet) checkLog() {
	log := k.log()
	harness.Want(k.t, !strings.Contains(log, "Updating kernel flag"), "the kubelet changed a setting of the machine's kernel")
	at := 0
	for line := range strings.Lines(log) {
		isDown := at >= k.marks[0] && at < k.marks[1]
		at += len(line)
		isHarmless := slices.ContainsFunc(harmless, func(h struct{ text, why string }) bool { return strings.Contains(line, h.text) })
		harness.Want(k.t, !runtimeError.MatchString(line) || isHarmless || isDown && down.MatchString(line),
			"the kubelet complains (the daemon is down: %t): %s", isDown, line)
	}
}
