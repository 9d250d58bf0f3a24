// Package kubelet tests minicri below a real kubelet, which hack/kubelet builds: static pods without an API
// server, on a node of package nodetest. KUBERNETES is its version, if it is not that of hack/cluster/kubernetes.
package kubelet

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

// abbreviations are what manifests have of all containers and probes. FOREVER is the end of a script whose container
// ends at SIGTERM; a probe asks every second, and its time-out is for busy machines.
var abbreviations = strings.NewReplacer(
	"IMAGE", `image: "`+imageName+`", imagePullPolicy: Never`,
	"FOREVER", "; trap 'exit 0' TERM; while true; do sleep 0.1; done",
	"PROBE", "periodSeconds: 1, timeoutSeconds: 20, failureThreshold: 1",
)

// apply makes a static pod: it writes the manifest, by rename.
func (k *kubelet) apply(name, spec string) {
	text := "apiVersion: v1\nkind: Pod\nmetadata: {name: " + name + ", namespace: default}\nspec:\n  terminationGracePeriodSeconds: 2\n" + spec
	half := k.path(name + ".yaml")
	harness.Check(k.t, errors.Join(os.WriteFile(half, []byte(abbreviations.Replace(text)), 0o600), os.Rename(half, k.manifest(name))))
}

func (k *kubelet) manifest(name string) string { return k.path("manifests/" + name + ".yaml") }

// delete takes a manifest away: the kubelet then ends the pod.
func (k *kubelet) delete(name string) { harness.Check(k.t, os.Remove(k.manifest(name))) }

// pair is a pod whose sidecar serves an init container, whose result a server serves to a
// client. The server's files are in a volume that the kubelet mounts, the client is as
// restricted as the pod security standard of that name, and all share the process namespace.
const pair = `
  shareProcessNamespace: true
  volumes: [{name: www, emptyDir: {medium: Memory}}]
  initContainers:
  - {name: sidecar, IMAGE, restartPolicy: Always,
     command: [sh, -c, "mkdir /files && echo from the sidecar >/files/page && httpd -p 127.0.0.1:9000 -h /files FOREVER"]}
  - {name: prepare, IMAGE, volumeMounts: [{name: www, mountPath: /www}],
     command: [sh, -c, "until wget -qO /www/page http://127.0.0.1:9000/page; do sleep 0.1; done; dd if=/dev/zero of=/www/big bs=1M count=4"]}
  containers:
  - {name: server, IMAGE, volumeMounts: [{name: www, mountPath: /www}], command: [sh, -c, "httpd -p 8080 -h /www FOREVER"],
     readinessProbe: {httpGet: {path: /page, port: 8080}, PROBE}}
  - {name: client, IMAGE,
     command: [sh, -c, "until wget -qO- http://127.0.0.1:8080/page 2>/dev/null; do sleep 0.1; done; echo said so FOREVER"],
     securityContext: {runAsUser: 1000, runAsNonRoot: true, readOnlyRootFilesystem: true, allowPrivilegeEscalation: false,
                       capabilities: {drop: [ALL]}, seccompProfile: {type: RuntimeDefault}}}
`

// bigFile is the size of a file that the pair's server serves.
const bigFile = 4 << 20

func (k *kubelet) checkPair() {
	pod := k.awaitReady("pair")
	all := slices.Concat(pod.Status.ContainerStatuses, pod.Status.InitContainerStatuses)
	i := slices.IndexFunc(all, func(s corev1.ContainerStatus) bool { return s.Name == "prepare" })
	harness.Want(k.t, i >= 0 && all[i].State.Terminated != nil && all[i].State.Terminated.ExitCode == 0 && all[i].State.Terminated.Reason == "Completed",
		"the init container: %v", all)
	prepare := k.inRuntime("pair", "prepare")
	harness.Want(k.t, k.inRuntime("pair", "sidecar").StartedAt <= prepare.StartedAt, "the init container started before the sidecar")
	harness.Want(k.t, k.inRuntime("pair", "server").CreatedAt >= prepare.FinishedAt, "the server was created before the init container had ended")
	k.eventually("the client has the page by localhost, and logs it", func() bool {
		return k.logs("pair", "client", "") == "from the sidecar\nsaid so\n"
	})
	harness.Same(k.t, "last line", k.logs("pair", "client", "tailLines=1"), "said so\n")
	for _, said := range []struct{ name, command, want string }{
		{"server", "grep -c ./www.tmpfs /proc/mounts", "1\n"},
		{"server", "cat /proc/1/comm", "pause\n"},
		{"client", "grep -E (CapEff|Seccomp|NoNewPrivs): /proc/self/status", "CapEff:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\n"},
		{"client", "id -u", "1000\n"},
		{"client", "cat /etc/hostname", "pair-node\n"},
		{"client", "cat /etc/resolv.conf", "nameserver 192.0.2.53\n"},
		{"client", "grep pair /etc/hosts", pod.Status.PodIP + "\tpair-node\n"},
	} {
		harness.Same(k.t, said.command, k.run("pair", said.name, said.command), said.want)
	}
	harness.Same(k.t, "bytes that the node reads from the pod", len(k.fetch(pod.Status.PodIP+":8080", "/big")), bigFile)
}

// host is a privileged pod in the node's network and process namespace.
const host = `
  hostNetwork: true
  hostPID: true
  containers:
  - {name: server, IMAGE, securityContext: {privileged: true}, readinessProbe: {httpGet: {path: /page, port: 8081}, PROBE},
     command: [sh, -c, "mkdir /www && echo on the node >/www/page && httpd -p 8081 -h /www FOREVER"]}
`

func (k *kubelet) checkHost() {
	k.awaitReady("host")
	harness.Same(k.t, "page", k.fetch(nodeAddress+":8081", "/page"), "on the node\n")
	k.run("host", "server", fmt.Sprintf("ls /proc/%d", k.process.Process.Pid))
}

// fetch asks a server in the node's network namespace.
func (k *kubelet) fetch(server, path string) string {
	request, err := http.NewRequestWithContext(k.limited(), http.MethodGet, "http://"+k.Relay(server)+path, nil)
	harness.Check(k.t, err)
	request.Close = true
	response, err := http.DefaultClient.Do(request)
	harness.Check(k.t, err)
	defer response.Body.Close()
	data, err := io.ReadAll(response.Body)
	harness.Check(k.t, err)
	return string(data)
}

// Labels by which a kubelet finds its own.
const (
	podLabel       = "io.kubernetes.pod.name"
	containerLabel = "io.kubernetes.container.name"
)

// listed are the containers that the runtime has.
func (k *kubelet) listed(filter *runtimeapi.ContainerFilter) []*runtimeapi.Container {
	return nodetest.Call(k.t, k.Runtime.ListContainers, &runtimeapi.ListContainersRequest{Filter: filter}).Containers
}

// inRuntime is what the runtime knows of a pod's container.
func (k *kubelet) inRuntime(pod, name string) *runtimeapi.ContainerStatus {
	list := k.listed(&runtimeapi.ContainerFilter{LabelSelector: map[string]string{podLabel: pod + "-" + nodeName, containerLabel: name}})
	harness.Need(k.t, len(list) == 1, "the runtime has %d containers %s of pod %s", len(list), name, pod)
	return nodetest.Call(k.t, k.Runtime.ContainerStatus, &runtimeapi.ContainerStatusRequest{ContainerId: list[0].Id}).Status
}

// running tells for each pod and container that runs what it would lose if it was started again: id and process.
func (k *kubelet) running() map[string]string {
	found := make(map[string]string)
	ready := &runtimeapi.PodSandboxFilter{State: &runtimeapi.PodSandboxStateValue{State: runtimeapi.PodSandboxState_SANDBOX_READY}}
	for _, pod := range nodetest.Call(k.t, k.Runtime.ListPodSandbox, &runtimeapi.ListPodSandboxRequest{Filter: ready}).Items {
		answer := nodetest.Call(k.t, k.Runtime.PodSandboxStatus, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: pod.Id, Verbose: true})
		found[pod.Metadata.Name] = pod.Id + " " + k.pid(answer.Info)
	}
	state := &runtimeapi.ContainerStateValue{State: runtimeapi.ContainerState_CONTAINER_RUNNING}
	for _, c := range k.listed(&runtimeapi.ContainerFilter{State: state}) {
		answer := nodetest.Call(k.t, k.Runtime.ContainerStatus, &runtimeapi.ContainerStatusRequest{ContainerId: c.Id, Verbose: true})
		found[c.Labels[podLabel]+"/"+c.Metadata.Name] = c.Id + " " + k.pid(answer.Info)
	}
	return found
}

func (k *kubelet) pid(verbose map[string]string) string {
	var info struct{ PID int }
	err := json.Unmarshal([]byte(verbose["info"]), &info)
	harness.Want(k.t, err == nil && info.PID != 0, "no pid in %v: %v", verbose, err)
	return fmt.Sprint(info.PID)
}

func TestMain(m *testing.M) { os.Exit(nodetest.Main(m)) }

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
	gates := k.gates()
	k.start(gates)
	k.settle()
	k.untouched("by the kubelet's restart", before)
	if gates["EmptyDirVolumeMode"] != nil {
		k.checkAlpha()
	}
	k.checkKilledDaemon()
	k.checkSummary()
	k.checkPodSummary()
	k.checkMetrics()
	k.checkEverythingGoes()
	k.stop()
	k.checkLog()
}

// gates are the feature gates by which a kubelet leaves more to the runtime, as far as its version has them.
func (k *kubelet) gates() nodetest.Object {
	gates := nodetest.Object{"PodAndContainerStatsFromCRI": true, "EventedPLEG": true}
	output, err := exec.Command(k.binary, "--version").Output()
	harness.Check(k.t, err)
	var minor int
	_, err = fmt.Sscanf(string(output), "Kubernetes v1.%d.", &minor)
	harness.Check(k.t, err)
	if minor >= 36 {
		gates["CRIListStreaming"] = true
	}
	if minor >= 37 {
		for _, gate := range []string{"DefaultPodSysctls", "VolumeBindMountOptions", "EmptyDirVolumeMode"} {
			gates[gate] = true
		}
	}
	return gates
}

// alpha is a pod with what is alpha in Kubernetes 1.37, and with limits of the whole pod. 488 is 0750.
const alpha = `
  securityContext: {sysctls: [{name: net.ipv4.ip_unprivileged_port_start, value: "333"}]}
  resources: {requests: {cpu: 50m, memory: 32Mi}, limits: {cpu: 500m, memory: 96Mi}}
  volumes: [{name: data, emptyDir: {mode: 488}}]
  containers:
  - {name: app, IMAGE, volumeMounts: [{name: data, mountPath: /data, bindMountOptions: [noexec, nosuid, nodev]}],
     command: [sh, -c, "true FOREVER"]}
`

func (k *kubelet) checkAlpha() {
	k.apply("alpha", alpha)
	pod := k.awaitReady("alpha")
	for _, said := range []struct{ command, want string }{
		{"cat /proc/sys/net/core/somaxconn", "555\n"},                  // the kubelet's default
		{"cat /proc/sys/net/ipv4/ip_unprivileged_port_start", "333\n"}, // the pod's own, not the default
		{"stat -c %a /data", "750\n"},
		{"grep -cE ./data.[a-z0-9]+.rw,nosuid,nodev,noexec /proc/mounts", "1\n"},
	} {
		harness.Same(k.t, said.command, k.run("alpha", "app", said.command), said.want)
	}
	limit := ""
	for _, dir := range k.cgroups(string(pod.UID)) {
		for _, file := range []string{"memory.max", "memory.limit_in_bytes"} {
			data, err := os.ReadFile(filepath.Join(dir, file))
			harness.Check(k.t, harness.IgnoreMissing(err))
			limit += string(data)
		}
	}
	harness.Same(k.t, "limit of the pod's memory", limit, fmt.Sprintln(96*mega))
	k.delete("alpha")
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
	k.eventually("the kubelet has asked for the new pod", func() bool {
		pods := nodetest.Call(k.t, k.Runtime.ListPodSandbox, &runtimeapi.ListPodSandboxRequest{}).Items
		return slices.ContainsFunc(pods, func(p *runtimeapi.PodSandbox) bool { return p.Metadata.Name == "born-"+nodeName })
	})
	k.Kill()
	k.eventually("the kubelet has asked several times without a daemon", func() bool {
		return len(down.FindAllString(k.log()[k.marks[0]:], 3)) == 3
	})
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
	from := len(k.log())
	k.eventually("the kubelet has looked twice after every pod", func() bool {
		log := k.log()[from:]
		for name := range k.pods() {
			sync := regexp.MustCompile(`SyncLoop \(SYNC\).*default/` + name + "-" + nodeName + `\b`)
			if len(sync.FindAllString(log, 2)) < 2 {
				return false
			}
		}
		return true
	})
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
		pods := nodetest.Call(k.t, k.Runtime.ListPodSandbox, &runtimeapi.ListPodSandboxRequest{})
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
