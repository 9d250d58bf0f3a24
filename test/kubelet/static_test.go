package kubelet

import (
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/minicri/minicri/test/harness"
)

// Two lives of one kubelet, in the order of the steps: a start takes seconds, a
// kubelet collects what is dead once a minute, and things take their time side
// by side. The first has the default gates. The second has those by which a
// kubelet leaves more to the runtime: numbers of pods, streamed lists, events.
//
// cri: Container.metadata ContainerStatusRequest.verbose ContainerStatusResponse.info
// cri: ContainerStatusResponse.status ListContainersRequest.filter ListContainersResponse.containers
// cri: ListPodSandboxRequest.filter ListPodSandboxResponse.items PodSandboxStatusResponse.info
func TestStaticPods(t *testing.T) {
	k := newKubelet(t)
	k.start(nil)
	k.applyPair()
	k.applyHost()
	k.applyLoad()
	k.checkPair()
	k.checkHost()
	k.checkExec()
	k.checkSummary()

	k.checkRestartedKubelet()
	k.apply("ending", containers(shell("app", "trap 'sleep 1; exit 0' TERM; while true; do sleep 0.1; done")))
	k.checkKilledDaemon()
	k.checkSummary()
	k.checkPodSummary()
	k.checkMetrics()
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

// checkKilledDaemon kills the daemon while one pod is made and another one ends:
// the other pods live on, the kubelet restarts nothing when there is a daemon
// again, and finishes what was half done.
func (k *kubelet) checkKilledDaemon() {
	before, ending := k.running(), string(k.awaitReady("ending").UID)
	k.markLog()
	k.apply("born", containers(shell("app", "true"+forever)))
	k.delete("ending")
	time.Sleep(rand.N(500 * time.Millisecond))
	k.Kill()
	time.Sleep(downTime)
	k.Start()
	k.settle()
	eventually(k.t, "the pod that was ending has ended", func() bool { return len(k.cgroups(ending)) == 0 })
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

// untouched ignores the pod that was ending.
func (k *kubelet) untouched(when string, before map[string]string) {
	k.t.Helper()
	after := k.running()
	for name, id := range before {
		if strings.HasPrefix(name, "ending-") {
			continue
		}
		same(k.t, name+" was touched "+when, after[name], id)
	}
}

// checkEverythingGoes ends all pods, and waits until kubelet and runtime have
// nothing left of them.
func (k *kubelet) checkEverythingGoes() {
	for name := range k.pods() {
		k.delete(name)
	}
	eventually(k.t, "the runtime has no pod and no container", k.empty)
	eventually(k.t, "the kubelet has no pod's files, logs and cgroups", func() bool {
		return k.isEmpty(filepath.Join(k.path("root"), "pods")) && k.isEmpty(k.path("logs")) && len(k.cgroups("")) == 0
	})
}

func (k *kubelet) isEmpty(dir string) bool {
	k.t.Helper()
	entries, err := os.ReadDir(dir)
	check(k.t, err)
	return len(entries) == 0
}

// cgroups are those of the pods whose uid begins so.
func (k *kubelet) cgroups(uid string) (found []string) {
	k.t.Helper()
	for _, class := range []string{"*kubepods*", "*kubepods*/*"} { // the driver systemd repeats the names of those above
		for _, hierarchy := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/*"} {
			dirs, err := filepath.Glob(filepath.Join(hierarchy, k.CgroupParent, class, "*pod"+strings.ReplaceAll(uid, "-", "_")+"*"))
			check(k.t, err)
			found = append(found, dirs...)
		}
	}
	return found
}
