package kubelet

import (
	"net/http"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/minicri/minicri/test/harness"
)

// Two lives of one kubelet, in the order of the steps: a start takes seconds, a
// kubelet collects what is dead once a minute, and things take their time side
// by side. The first has the default gates; the second takes what is measured
// of pods from the runtime.
func TestStaticPods(t *testing.T) {
	k := newKubelet(t)
	k.start(nil)
	k.applyPair()
	k.applyHost()
	k.applyCrash()
	k.applyProbed()
	k.applyGraceful()
	k.applyLoad()
	k.applyUserns()
	k.checkPair()
	k.checkHost()
	k.checkCrash()
	k.checkProbes()
	k.checkExec()
	k.checkUserns()
	k.checkSummary()

	k.checkRestartedKubelet()
	k.applyChatty()
	k.checkGracefulDeletion()
	k.checkKilledDaemon()
	k.checkForward()
	k.checkSummary()
	k.checkPodSummary()
	k.checkRotation()
	k.checkEverythingGoes()
	k.stop()
	k.checkLog()
}

// awaitReady waits until the kubelet says that a pod is ready.
func (k *kubelet) awaitReady(name string) (pod *corev1.Pod) {
	k.t.Helper()
	eventually(k.t, "pod "+name+" is ready", func() bool {
		pod = k.pods()[name]
		return isReady(pod)
	})
	return pod
}

// downTime is how long the daemon is away: long enough for the kubelet to ask
// several times.
const downTime = 3 * time.Second

// checkKilledDaemon kills the daemon: pods live on, and the kubelet restarts
// nothing when there is a daemon again.
func (k *kubelet) checkKilledDaemon() {
	before := k.running()
	k.markLog()
	k.Kill()
	time.Sleep(downTime)
	k.Start()
	k.settle()
	k.markLog()
	k.untouched("by the daemon's death", before)
}

// checkRestartedKubelet starts the kubelet again.
func (k *kubelet) checkRestartedKubelet() {
	before := k.running()
	k.stop()
	k.start(harness.Object{"PodAndContainerStatsFromCRI": true, "CRIListStreaming": true, "EventedPLEG": true})
	k.settle()
	k.untouched("by the kubelet's restart", before)
}

// settle waits until the kubelet has both its connections to the runtime, that
// for containers and that for images, and then has looked after every pod.
func (k *kubelet) settle() {
	k.t.Helper()
	eventually(k.t, "the kubelet reaches the runtime", func() bool {
		_, runtime := k.ask(http.MethodPost, "/run/"+container("pair", "server")+"?cmd=true")
		_, image := k.ask(http.MethodGet, "/stats/summary")
		return runtime == nil && image == nil
	})
	time.Sleep(2 * syncPeriod)
	for name := range k.pods() {
		k.awaitReady(name)
	}
}

func (k *kubelet) untouched(when string, before map[string]string) {
	k.t.Helper()
	after := k.running()
	for name, id := range before {
		same(k.t, name+" was touched "+when, after[name], id)
	}
}
