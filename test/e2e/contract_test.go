package e2e

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

// counted is a pod with one running container, whose numbers and attributes are asked for in every way that
// the CRI has.
type counted struct {
	*nodetest.Node
	pod, container string
}

func newCounted(t *testing.T) *counted {
	n := newNode(t)
	n.ImportBusybox()
	config := n.PodConfig("counted")
	config.Labels, config.Annotations = map[string]string{"app": "counted"}, map[string]string{"pod": "note"}
	c := &counted{Node: n, pod: n.RunPod(config)}
	n.RunPod(n.PodConfig("other"))
	app := nodetest.Container("app", "sh", "-c", "echo 1 > /file; echo written; sleep 1000000")
	app.Metadata.Attempt, app.Image.UserSpecifiedImage = 3, "registry.test/as/written:1"
	app.Labels, app.Annotations = map[string]string{"tier": "front"}, map[string]string{"container": "note"}
	c.container = n.RunContainer(c.pod, config, app)
	harness.Eventually(t, "the container has written", func() bool {
		log, _ := os.ReadFile(filepath.Join(config.LogDirectory, "app.log")) // it may not be there yet
		return strings.Contains(string(log), "written")
	})
	return c
}

// The stats of containers and pods have their attributes and numbers, and every filter.
//
// cri: ContainerStats ListContainerStats StreamContainerStats ContainerStats.attributes ContainerAttributes.id
// cri: ContainerAttributes.metadata ContainerAttributes.labels ContainerAttributes.annotations ContainerStatsFilter.id
// cri: ContainerStatsFilter.label_selector ContainerStatsFilter.pod_sandbox_id ContainerStatsResponse.stats
// cri: ListContainerStatsRequest.filter ListContainerStatsResponse.stats StreamContainerStatsRequest.filter
// cri: StreamContainerStatsResponse.container_stats ContainerStats.writable_layer FilesystemUsage.timestamp FilesystemUsage.inodes_used
// cri: MemoryUsage.timestamp PodSandboxStats ListPodSandboxStats StreamPodSandboxStats PodSandboxStatsFilter.id
// cri: PodSandboxStatsFilter.label_selector PodSandboxStatsResponse.stats PodSandboxAttributes.id PodSandboxAttributes.metadata
// cri: PodSandboxAttributes.labels PodSandboxAttributes.annotations StreamPodSandboxStatsRequest.filter ListPodSandboxStatsRequest.filter
// cri: ListPodSandboxStatsResponse.stats ProcessUsage.timestamp ProcessUsage.process_count LinuxPodSandboxStats.containers
// cri: PodSandboxStats.windows CpuUsage.timestamp LinuxPodSandboxStats.cpu LinuxPodSandboxStats.process PodSandboxStats.attributes
// cri: PodSandboxStats.linux PodSandboxStatsRequest.pod_sandbox_id StreamPodSandboxStatsResponse.pod_sandbox_stats
// cri: ContainerStatsRequest.container_id
func TestStatsFilters(t *testing.T) {
	c := newCounted(t)
	type filter = runtimeapi.ContainerStatsFilter
	for name, test := range harness.Sorted(map[string]struct {
		filter *filter
		want   int
	}{
		"none":            {nil, 1},
		"another id":      {&filter{Id: c.pod}, 0},
		"another label":   {&filter{LabelSelector: map[string]string{"tier": "back"}}, 0},
		"all of them":     {&filter{Id: c.container, PodSandboxId: c.pod}, 1},
		"not all of them": {&filter{Id: c.container, PodSandboxId: c.container}, 0},
	}) {
		listed := nodetest.Call(t, c.Runtime.ListContainerStats, &runtimeapi.ListContainerStatsRequest{Filter: test.filter})
		stream, err := c.Runtime.StreamContainerStats(harness.Limited(t), &runtimeapi.StreamContainerStatsRequest{Filter: test.filter})
		streamed := receive(t, stream, err, (*runtimeapi.StreamContainerStatsResponse).GetContainerStats)
		harness.Want(t, len(listed.Stats) == test.want && len(streamed) == test.want,
			"%s: %d listed, %d streamed, want %d", name, len(listed.Stats), len(streamed), test.want)
		for _, one := range append(listed.Stats, streamed...) {
			c.wantAttributes(t, one.Attributes)
		}
	}
	container := nodetest.Call(t, c.Runtime.ContainerStats, &runtimeapi.ContainerStatsRequest{ContainerId: c.container})
	c.wantAttributes(t, container.Stats.Attributes)
	layer, memory := container.Stats.WritableLayer, container.Stats.Memory
	harness.Want(t, layer.GetUsedBytes().GetValue() != 0, "the writable layer is %v, the memory %v", layer, memory)
	harness.Want(t, layer.GetInodesUsed().GetValue() != 0, "the writable layer is %v, the memory %v", layer, memory)
	harness.Want(t, layer.GetFsId().GetMountpoint() != "", "the writable layer is %v, the memory %v", layer, memory)
	harness.Want(t, layer.GetTimestamp() != 0, "the writable layer is %v, the memory %v", layer, memory)
	harness.Want(t, memory.GetWorkingSetBytes().GetValue() != 0,
		"the writable layer is %v, the memory %v", layer, memory)
	harness.Want(t, memory.GetTimestamp() != 0, "the writable layer is %v, the memory %v", layer, memory)

	for id, want := range harness.Sorted(map[string]int{"": 1, c.container: 0}) {
		filter := &runtimeapi.PodSandboxStatsFilter{Id: id, LabelSelector: map[string]string{"app": "counted"}}
		listed := nodetest.Call(t, c.Runtime.ListPodSandboxStats, &runtimeapi.ListPodSandboxStatsRequest{Filter: filter})
		stream, err := c.Runtime.StreamPodSandboxStats(harness.Limited(t), &runtimeapi.StreamPodSandboxStatsRequest{Filter: filter})
		streamed := receive(t, stream, err, (*runtimeapi.StreamPodSandboxStatsResponse).GetPodSandboxStats)
		harness.Want(t, len(listed.Stats) == want && len(streamed) == want,
			"id %q: %d listed, %d streamed, want %d", id, len(listed.Stats), len(streamed), want)
	}
	pod := nodetest.Call(t, c.Runtime.PodSandboxStats, &runtimeapi.PodSandboxStatsRequest{PodSandboxId: c.pod})
	a, linux := pod.Stats.GetAttributes(), pod.Stats.GetLinux()
	harness.Want(t, a.GetId() == c.pod, "the attributes are %v", a)
	harness.Want(t, a.GetMetadata().GetName() == "counted", "the attributes are %v", a)
	harness.Want(t, a.GetLabels()["app"] == "counted", "the attributes are %v", a)
	harness.Want(t, a.GetAnnotations()["pod"] == "note", "the attributes are %v", a)
	harness.Want(t, linux.GetProcess().GetTimestamp() != 0, "the stats are %v", pod.Stats)
	harness.Want(t, linux.GetProcess().GetProcessCount().GetValue() >= 2, "the stats are %v", pod.Stats)
	harness.Want(t, len(linux.GetContainers()) == 1, "the stats are %v", pod.Stats)
	harness.Want(t, linux.GetNetwork().GetDefaultInterface().GetName() == "eth0", "the stats are %v", pod.Stats)
	harness.Want(t, linux.GetCpu().GetTimestamp() > 0, "the stats are %v", pod.Stats)
	harness.Want(t, pod.Stats.GetWindows() == nil, "the stats are %v", pod.Stats)
	nodetest.WantCode(t, nodetest.Err(t, c.Runtime.PodSandboxStats, &runtimeapi.PodSandboxStatsRequest{PodSandboxId: c.container}), codes.NotFound)
	nodetest.WantCode(t, nodetest.Err(t, c.Runtime.ContainerStats, &runtimeapi.ContainerStatsRequest{ContainerId: c.pod}), codes.NotFound)
}

func (c *counted) wantAttributes(t *testing.T, a *runtimeapi.ContainerAttributes) {
	t.Helper()
	harness.Want(t, a.GetId() == c.container, "the attributes are %v", a)
	harness.Want(t, a.GetMetadata().GetName() == "app", "the attributes are %v", a)
	harness.Want(t, a.GetLabels()["tier"] == "front", "the attributes are %v", a)
	harness.Want(t, a.GetAnnotations()["container"] == "note", "the attributes are %v", a)
}

// Every metric that is described is of its kind, has its labels and a time; pods and containers have theirs,
// listed and streamed.
//
// cri: ListMetricDescriptors ListMetricDescriptorsResponse.descriptors MetricDescriptor.help MetricDescriptor.label_keys
// cri: ListPodSandboxMetrics ListPodSandboxMetricsResponse.pod_metrics StreamPodSandboxMetrics
// cri: StreamPodSandboxMetricsResponse.pod_sandbox_metrics PodSandboxMetrics.pod_sandbox_id PodSandboxMetrics.container_metrics
// cri: PodSandboxMetrics.metrics ContainerMetrics.container_id ContainerMetrics.metrics Metric.timestamp Metric.metric_type
// cri: Metric.label_values Metric.name Metric.value MetricDescriptor.name
func TestMetricsOfPods(t *testing.T) {
	before := time.Now()
	c := newCounted(t)
	described := nodetest.Call(t, c.Runtime.ListMetricDescriptors, &runtimeapi.ListMetricDescriptorsRequest{})
	labels := make(map[string][]string)
	for _, d := range described.Descriptors {
		labels[d.Name] = d.LabelKeys
		harness.Want(t, d.Help != "", "%s has no help", d.Name)
	}
	for _, name := range []string{"container_hugetlb_usage_bytes", "container_hugetlb_max_usage_bytes", "container_spec_memory_reservation_limit_bytes", "container_ulimits_soft"} {
		harness.Want(t, labels[name] != nil, "%s, which critest wants, is not described", name)
	}
	listed := nodetest.Call(t, c.Runtime.ListPodSandboxMetrics, &runtimeapi.ListPodSandboxMetricsRequest{})
	stream, err := c.Runtime.StreamPodSandboxMetrics(harness.Limited(t), &runtimeapi.StreamPodSandboxMetricsRequest{})
	streamed := receive(t, stream, err, (*runtimeapi.StreamPodSandboxMetricsResponse).GetPodSandboxMetrics)
	for how, pods := range harness.Sorted(map[string][]*runtimeapi.PodSandboxMetrics{"list": listed.PodMetrics, "stream": streamed}) {
		at := slices.IndexFunc(pods, func(p *runtimeapi.PodSandboxMetrics) bool { return p.PodSandboxId == c.pod })
		harness.Need(t, at >= 0 && len(pods[at].ContainerMetrics) == 1, "the %s is %v", how, pods)
		harness.Need(t, pods[at].ContainerMetrics[0].ContainerId == c.container, "the %s is %v", how, pods)
		found := make(map[string]*runtimeapi.Metric)
		for _, m := range append(pods[at].Metrics, pods[at].ContainerMetrics[0].Metrics...) {
			found[m.Name] = m
			harness.Want(t, len(m.LabelValues) == len(labels[m.Name]) && !time.Unix(0, m.Timestamp).Before(before),
				"%s: labels %q for %q, of %d", m.Name, m.LabelValues, labels[m.Name], m.Timestamp)
		}
		if processes := found["container_processes"]; processes.GetValue().GetValue() < 1 || processes.GetMetricType() != runtimeapi.MetricType_GAUGE ||
			found["container_cpu_usage_seconds_total"].GetMetricType() != runtimeapi.MetricType_COUNTER || found["container_network_receive_bytes_total"] == nil {
			t.Errorf("the metrics of the %s are %v", how, found)
		}
	}
}

// The resources of a pod are recorded and shown, those of the last update or those that
// it was made with, for a pod that has ended too. What an update does not give stays.
//
// cri: LinuxPodSandboxConfig.overhead LinuxPodSandboxConfig.resources UpdatePodSandboxResources
// cri: UpdatePodSandboxResourcesRequest.overhead
// cri: UpdatePodSandboxResourcesRequest.pod_sandbox_id UpdatePodSandboxResourcesRequest.resources
func TestUpdatePodSandboxResources(t *testing.T) {
	n := newNode(t)
	shares := func(count int64) *runtimeapi.LinuxContainerResources {
		return &runtimeapi.LinuxContainerResources{CpuShares: count}
	}
	id, ended := n.RunPod(n.PodConfig("web", func(c *runtimeapi.PodSandboxConfig) {
		c.Linux.Overhead, c.Linux.Resources = shares(7), shares(66)
	})), n.RunPod(n.PodConfig("ended"))
	check(t, stop(t, n, ended))
	shown := func(id, overhead, resources, memory string) {
		response := nodetest.Call(t, n.Runtime.PodSandboxStatus, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id, Verbose: true})
		var got struct {
			Overhead, Resources struct{ CPUShares, MemoryLimitInBytes string }
		}
		check(t, json.Unmarshal([]byte(response.GetInfo()["info"]), &got))
		harness.Want(t, got.Overhead.CPUShares == overhead,
			"shown are %+v, want %q, %q, %q", got, overhead, resources, memory)
		harness.Want(t, got.Resources.CPUShares == resources,
			"shown are %+v, want %q, %q, %q", got, overhead, resources, memory)
		harness.Want(t, got.Resources.MemoryLimitInBytes == memory,
			"shown are %+v, want %q, %q, %q", got, overhead, resources, memory)
	}
	update := func(id string, resources, overhead *runtimeapi.LinuxContainerResources, code codes.Code) {
		_, err := n.Runtime.UpdatePodSandboxResources(harness.Limited(t), &runtimeapi.UpdatePodSandboxResourcesRequest{PodSandboxId: id, Resources: resources, Overhead: overhead})
		nodetest.WantCode(t, err, code)
	}
	shown(id, "7", "66", "")
	for one, overhead := range harness.Sorted(map[string]string{id: "7", ended: ""}) {
		update(one, &runtimeapi.LinuxContainerResources{CpuShares: 512, MemoryLimitInBytes: 1 << 30}, nil, codes.OK)
		shown(one, overhead, "512", "1073741824")
	}
	update(id, nil, shares(9), codes.OK)
	shown(id, "9", "512", "1073741824")
	update("", nil, nil, codes.InvalidArgument)
	update("gone", shares(512), nil, codes.NotFound)
	update(id, shares(-5), nil, codes.InvalidArgument)
	update(id, nil, shares(-5), codes.InvalidArgument)
}
