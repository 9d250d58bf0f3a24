package kubelet

import (
	"bytes"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"

	"github.com/minicri/minicri/test/harness"
)

// podStats and containerStats are what tests look at of the answer to /stats/summary.
type podStats struct {
	PodRef struct{ Name string }
	containerStats
	Containers []containerStats
	Network    struct {
		Name             string
		RxBytes, TxBytes uint64
	}
	EphemeralStorage used `json:"ephemeral-storage"`
}

type containerStats struct {
	Name         string
	CPU          struct{ UsageNanoCores, UsageCoreNanoSeconds uint64 }
	Memory       struct{ AvailableBytes, WorkingSetBytes uint64 }
	Rootfs, Logs used
}

type used struct{ UsedBytes uint64 }

func (k *kubelet) stats(pod string) podStats {
	body, err := k.ask(http.MethodGet, "/stats/summary")
	harness.Check(k.t, err)
	var all struct{ Pods []podStats }
	harness.Check(k.t, json.Unmarshal([]byte(body), &all))
	for _, p := range all.Pods {
		if p.PodRef.Name == pod+"-"+nodeName {
			return p
		}
	}
	return podStats{}
}

func (p podStats) container(name string) containerStats {
	for _, c := range p.Containers {
		if c.Name == name {
			return c
		}
	}
	return containerStats{}
}

const (
	mega     = 1 << 20
	heldFile = 32 * mega // in memory
	diskFile = 8 * mega  // in the writable layer
)

// load is a pod that uses what there are numbers of.
const load = `
  volumes: [{name: memory, emptyDir: {medium: Memory}}]
  containers:
  - {name: burn, IMAGE, resources: {limits: {cpu: 200m, memory: 64Mi}}, command: [sh, -c, "trap 'exit 0' TERM; while true; do :; done"]}
  - {name: hold, IMAGE, resources: {limits: {cpu: 500m, memory: 128Mi}}, volumeMounts: [{name: memory, mountPath: /memory}],
     readinessProbe: {exec: {command: [test, -e, /ready]}, PROBE},
     command: [sh, -c, "dd if=/dev/zero of=/file bs=1M count=8 conv=fsync; dd if=/dev/zero of=/memory/file bs=1M count=32; touch /ready FOREVER"]}
`

// checkSummary looks at the numbers of containers. It waits until all is measured, which is done in the background.
func (k *kubelet) checkSummary() {
	k.awaitReady("load")
	var p podStats
	k.eventually("the load is measured", func() bool {
		p = k.stats("load")
		return p.container("burn").CPU.UsageNanoCores > 0 && p.container("hold").Rootfs.UsedBytes >= diskFile && p.EphemeralStorage.UsedBytes >= diskFile
	})
	burn, hold := p.container("burn"), p.container("hold")
	k.between("cpu of a container with a limit of 0.2", 20e6, burn.CPU.UsageNanoCores, 260e6)
	k.between("working set", heldFile, hold.Memory.WorkingSetBytes, heldFile+24*mega)
	k.between("available and working set", 128*mega-mega, hold.Memory.AvailableBytes+hold.Memory.WorkingSetBytes, 128*mega+mega)
	k.between("writable layer", diskFile, hold.Rootfs.UsedBytes, diskFile+mega)
	k.between("log", 1, hold.Logs.UsedBytes, mega)
	k.between("ephemeral storage of the pod", diskFile, p.EphemeralStorage.UsedBytes, diskFile+2*mega)
}

// checkPodSummary looks at the numbers of pods. It needs the feature gate PodAndContainerStatsFromCRI: without it a
// kubelet has them from cAdvisor, and those of the network only for runtimes that cAdvisor knows by name.
func (k *kubelet) checkPodSummary() {
	load := k.stats("load")
	burn, hold := load.container("burn"), load.container("hold")
	k.between("cpu time of the pod", burn.CPU.UsageCoreNanoSeconds, load.CPU.UsageCoreNanoSeconds, 3*burn.CPU.UsageCoreNanoSeconds+20e9)
	k.between("working set of the pod", hold.Memory.WorkingSetBytes-mega, load.Memory.WorkingSetBytes, hold.Memory.WorkingSetBytes+24*mega)
	before := k.stats("pair").Network
	harness.Same(k.t, "interface", before.Name, "eth0")
	k.between("received", 1, before.RxBytes, 1<<40)
	k.fetch(k.pods()["pair"].Status.PodIP+":8080", "/big")
	k.between("sent for a big file", bigFile, k.stats("pair").Network.TxBytes-before.TxBytes, 2*bigFile)
}

// holdMemory is a line of Prometheus' form; the time of the value may follow it.
var holdMemory = regexp.MustCompile(`(?m)^container_memory_working_set_bytes\{container="hold",.*pod="load-node".*\} (\S+)(?: \d+)?$`)

// checkMetrics looks for the runtime's metrics in the kubelet's, which need the same gate.
func (k *kubelet) checkMetrics() {
	k.between("working set in the metrics", heldFile, k.heldMemory(), heldFile+24*mega)
}

// heldMemory is the working set of a container in the kubelet's metrics, 0 if there is none.
func (k *kubelet) heldMemory() uint64 {
	text, err := k.ask(http.MethodGet, "/metrics/cadvisor")
	harness.Check(k.t, err)
	found := holdMemory.FindStringSubmatch(text)
	if found == nil {
		return 0
	}
	value, err := strconv.ParseFloat(found[1], 64)
	harness.Check(k.t, err)
	return uint64(value)
}

func (k *kubelet) between(what string, low, got, high uint64) {
	harness.Want(k.t, got >= low && got <= high, "%s: %d is not within %d and %d", what, got, low, high)
}

// ask sends a request to the kubelet and returns its answer.
func (k *kubelet) ask(method, path string) (body string, err error) {
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	defer transport.CloseIdleConnections()
	request, err := http.NewRequestWithContext(k.limited(), method, "https://"+k.server+path, nil)
	if err != nil {
		return "", err
	}
	response, err := (&http.Client{Transport: transport}).Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	data, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s %s: %s: %s", method, path, response.Status, data)
	}
	return string(data), err
}

// pods are those that the kubelet knows, by the names of their manifests.
func (k *kubelet) pods() map[string]*corev1.Pod {
	k.alive()
	body, err := k.ask(http.MethodGet, "/pods")
	harness.Check(k.t, err)
	var list corev1.PodList
	harness.Check(k.t, json.Unmarshal([]byte(body), &list))
	pods := make(map[string]*corev1.Pod)
	for _, pod := range list.Items {
		pods[strings.TrimSuffix(pod.Name, "-"+nodeName)] = &pod
	}
	return pods
}

// container names a container in URLs of the kubelet.
func container(pod, name string) string { return fmt.Sprintf("default/%s-%s/%s", pod, nodeName, name) }

// logs reads a container's log by the kubelet's API.
func (k *kubelet) logs(pod, name, query string) string {
	text, err := k.ask(http.MethodGet, "/containerLogs/"+container(pod, name)+"?"+query)
	harness.Check(k.t, err)
	return text
}

// run runs a command in a container by the kubelet's /run, which is ExecSync.
func (k *kubelet) run(pod, name, command string) string {
	text, err := k.ask(http.MethodPost, "/run/"+container(pod, name)+"?"+url.Values{"cmd": {command}}.Encode())
	harness.Check(k.t, err)
	return text
}

// checkExec runs a script in a container by the kubelet's /exec, as kubectl does it: by
// WebSocket, and SPDY for older servers; and by ExecSync.
func (k *kubelet) checkExec() {
	config := &rest.Config{TLSClientConfig: rest.TLSClientConfig{Insecure: true}}
	query := url.Values{"command": {"sh", "-c", "cat; echo oops >&2; exit 5"}, "input": {"1"}, "output": {"1"}, "error": {"1"}}
	server := &url.URL{Scheme: "https", Host: k.server, Path: "/exec/" + container("pair", "server"), RawQuery: query.Encode()}
	socket, err := remotecommand.NewWebSocketExecutor(config, http.MethodGet, server.String())
	harness.Check(k.t, err)
	spdy, err := remotecommand.NewSPDYExecutor(config, http.MethodPost, server)
	harness.Check(k.t, err)
	for name, executor := range harness.Sorted(map[string]remotecommand.Executor{"WebSocket": socket, "SPDY": spdy}) {
		var out, errs bytes.Buffer
		streams := remotecommand.StreamOptions{Stdin: strings.NewReader("some input"), Stdout: &out, Stderr: &errs}
		err := executor.StreamWithContext(k.limited(), streams)
		harness.Want(k.t, out.String() == "some input" && errs.String() == "oops\n" && err != nil && strings.Contains(err.Error(), "exit code 5"),
			"%s: got %q, %q and %v", name, &out, &errs, err)
	}
	harness.Same(k.t, "by ExecSync", k.run("pair", "server", "cat /www/page"), "from the sidecar\n")
}
