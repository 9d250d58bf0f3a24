package kubelet

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
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
	if i < 0 || all[i].State.Terminated == nil || all[i].State.Terminated.ExitCode != 0 || all[i].State.Terminated.Reason != "Completed" {
		k.t.Errorf("the init container: %v", all)
	}
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
	return harness.Call(k.t, k.Runtime.ListContainers, &runtimeapi.ListContainersRequest{Filter: filter}).Containers
}

// inRuntime is what the runtime knows of a pod's container.
func (k *kubelet) inRuntime(pod, name string) *runtimeapi.ContainerStatus {
	list := k.listed(&runtimeapi.ContainerFilter{LabelSelector: map[string]string{podLabel: pod + "-" + nodeName, containerLabel: name}})
	harness.Need(k.t, len(list) == 1, "the runtime has %d containers %s of pod %s", len(list), name, pod)
	return harness.Call(k.t, k.Runtime.ContainerStatus, &runtimeapi.ContainerStatusRequest{ContainerId: list[0].Id}).Status
}

// running tells for each pod and container that runs what it would lose if it was started again: id and process.
func (k *kubelet) running() map[string]string {
	found := make(map[string]string)
	ready := &runtimeapi.PodSandboxFilter{State: &runtimeapi.PodSandboxStateValue{State: runtimeapi.PodSandboxState_SANDBOX_READY}}
	for _, pod := range harness.Call(k.t, k.Runtime.ListPodSandbox, &runtimeapi.ListPodSandboxRequest{Filter: ready}).Items {
		answer := harness.Call(k.t, k.Runtime.PodSandboxStatus, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: pod.Id, Verbose: true})
		found[pod.Metadata.Name] = pod.Id + " " + k.pid(answer.Info)
	}
	state := &runtimeapi.ContainerStateValue{State: runtimeapi.ContainerState_CONTAINER_RUNNING}
	for _, c := range k.listed(&runtimeapi.ContainerFilter{State: state}) {
		answer := harness.Call(k.t, k.Runtime.ContainerStatus, &runtimeapi.ContainerStatusRequest{ContainerId: c.Id, Verbose: true})
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
