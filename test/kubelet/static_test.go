// Package kubelet tests minicri below a real kubelet, which hack/kubelet
// builds: static pods without an API server, on a node of package harness.
//
// The kubelet runs in the node's network namespace, so it reaches pods as on a real node, and in a mount namespace of
// its own (kubelet_test.go), which keeps the machine out of its reach. Its volumes are in a directory that both share,
// as on a real node. It is asked by its own API, by way of a relay into the network namespace.
//
// There is one test, because what takes most of its time can be shared: the
// kubelet's starts, and the minute after which it collects dead pods.
package kubelet

import (
	"cmp"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

func TestMain(m *testing.M) { os.Exit(harness.Main(m)) }

// Two lives of one kubelet, in the order of the steps: a start takes seconds, a kubelet collects what is dead once a
// minute, and things take their time side by side. The first has the default gates. The second has those by which a
// kubelet leaves more to the runtime: numbers of pods, streamed lists, events.
//
// cri: Container.metadata ContainerStatusRequest.verbose ContainerStatusResponse.info
// cri: ContainerStatusResponse.status ListContainersRequest.filter ListContainersResponse.containers
// cri: ListPodSandboxRequest.filter ListPodSandboxResponse.items PodSandboxStatusResponse.info
func TestStaticPods(t *testing.T) {
	k := newKubelet(t)
	k.start(nil)
	k.apply("pair", pair)
	k.apply("host", host)
	k.apply("load", load)
	k.checkPair()
	k.checkHost()
	k.checkExec()
	k.checkSummary()

	before := k.running()
	k.stop()
	k.start(harness.Object{"PodAndContainerStatsFromCRI": true, "CRIListStreaming": true, "EventedPLEG": true})
	k.settle()
	k.untouched("by the kubelet's restart", before)
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
	k.eventually("pod "+name+" is ready", func() bool {
		pod = k.pods()[name]
		return pod != nil && slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
		})
	})
	return pod
}

// downTime is how long the daemon is away: long enough for the kubelet to ask several times.
const downTime = 3 * time.Second

// checkKilledDaemon kills the daemon while one pod is made and another one ends: the other pods live on, the kubelet
// restarts nothing when there is a daemon again, and finishes what was half done.
func (k *kubelet) checkKilledDaemon() {
	const script = "  containers: [{name: app, IMAGE, command: [sh, -c, "
	k.apply("ending", script+`"trap 'sleep 1; exit 0' TERM; while true; do sleep 0.1; done"]}]`)
	ending := string(k.awaitReady("ending").UID)
	before := k.running()
	k.markLog()
	k.apply("born", script+`"true FOREVER"]}]`)
	k.delete("ending")
	time.Sleep(rand.N(500 * time.Millisecond))
	k.Kill()
	time.Sleep(downTime)
	k.Start()
	k.settle()
	k.eventually("the pod that was ending has ended", func() bool { return len(k.cgroups(ending)) == 0 })
	k.markLog()
	k.untouched("by the daemon's death", before)
}

// settle waits until the kubelet has both its connections to the runtime, that
// for containers and that for images, and then has looked after every pod.
func (k *kubelet) settle() {
	k.eventually("the kubelet reaches the runtime", func() bool {
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
	after := k.running()
	for name, id := range before {
		if !strings.HasPrefix(name, "ending-") {
			harness.Same(k.t, name+" was touched "+when, after[name], id)
		}
	}
}

// checkEverythingGoes ends all pods, and waits until kubelet and runtime have nothing left of them.
func (k *kubelet) checkEverythingGoes() {
	for name := range k.pods() {
		k.delete(name)
	}
	k.eventually("the runtime has no pod and no container", func() bool {
		pods := harness.Call(k.t, k.Runtime.ListPodSandbox, &runtimeapi.ListPodSandboxRequest{})
		return len(pods.Items)+len(k.listed(nil)) == 0
	})
	k.eventually("the kubelet has no pod's files, logs and cgroups", func() bool {
		left, err := os.ReadDir(k.path("root/pods"))
		harness.Check(k.t, err)
		logs, err := os.ReadDir(k.path("logs"))
		harness.Check(k.t, err)
		return len(left)+len(logs)+len(k.cgroups("")) == 0
	})
}

// cgroups are those of the pods whose uid begins so: a hexadecimal digit follows pod, which those above have in their names too.
func (k *kubelet) cgroups(uid string) (found []string) {
	for _, class := range []string{"*kubepods*", "*kubepods*/*"} { // the driver systemd repeats the names of those above
		for _, hierarchy := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/*"} {
			dirs := harness.Glob(k.t, hierarchy, k.CgroupParent, class, "*pod"+cmp.Or(strings.ReplaceAll(uid, "-", "_"), "[0-9a-f]")+"*")
			found = append(found, dirs...)
		}
	}
	return found
}
