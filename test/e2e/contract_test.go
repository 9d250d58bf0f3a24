package e2e

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// counted is a pod with one running container, whose numbers and attributes are
// asked for in every way that the CRI has.
type counted struct {
	*harness.Node
	t              testing.TB
	ctx            context.Context
	pod, container string
}

func newCounted(t testing.TB) *counted {
	t.Helper()
	n := harness.NewNode(t, harness.Parallel())
	// Made only now: before the node is made, the test waits for its turn.
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	t.Cleanup(cancel)
	n.ImportBusybox()
	config := n.PodConfig("counted")
	config.Labels = map[string]string{"app": "counted"}
	config.Annotations = map[string]string{"pod": "note"}
	c := &counted{Node: n, t: t, ctx: ctx, pod: n.RunPod(config)}
	n.RunPod(n.PodConfig("other"))
	created, err := n.Runtime.CreateContainer(ctx, &runtimeapi.CreateContainerRequest{PodSandboxId: c.pod, SandboxConfig: config, Config: &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: "app", Attempt: 3},
		Image:    &runtimeapi.ImageSpec{Image: harness.BusyboxImage, UserSpecifiedImage: "registry.test/as/written:1"},
		Command:  []string{"sh", "-c", "echo 1 > /file; echo written; sleep 1000000"}, LogPath: "app.log",
		Labels: map[string]string{"tier": "front"}, Annotations: map[string]string{"container": "note"},
		Linux: &runtimeapi.LinuxContainerConfig{},
	}})
	c.check(err)
	c.container = created.GetContainerId()
	_, err = n.Runtime.StartContainer(ctx, &runtimeapi.StartContainerRequest{ContainerId: c.container})
	c.check(err)
	eventually(t, "the container has written", patience, func() bool {
		log, _ := os.ReadFile(filepath.Join(config.LogDirectory, "app.log")) // it may not be there yet
		return strings.Contains(string(log), "written")
	})
	return c
}

func (c *counted) check(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

// The lists show a pod and a container with what they were made from; streams
// send the same, and filters leave out the rest.
//
// cri: StreamContainers StreamContainersRequest.filter Container.annotations Container.image
// cri: Container.image_ref Container.metadata ContainerMetadata.attempt ImageSpec.user_specified_image
// cri: PodSandbox.annotations PodSandbox.runtime_handler ListPodSandboxRequest.filter
// cri: ListContainersRequest.filter StreamPodSandboxes
func TestListsShowWhatWasAskedFor(t *testing.T) {
	c := newCounted(t)
	podFilter := &runtimeapi.PodSandboxFilter{LabelSelector: map[string]string{"app": "counted"}}
	pods, err := c.Runtime.ListPodSandbox(c.ctx, &runtimeapi.ListPodSandboxRequest{Filter: podFilter})
	c.check(err)
	podStream, err := c.Runtime.StreamPodSandboxes(c.ctx, &runtimeapi.StreamPodSandboxesRequest{Filter: podFilter})
	c.check(err)
	streamedPods, err := podStream.Recv()
	c.check(err)
	for how, list := range map[string][]*runtimeapi.PodSandbox{"list": pods.GetItems(), "stream": streamedPods.GetPodSandboxes()} {
		if len(list) != 1 || list[0].GetId() != c.pod || list[0].GetAnnotations()["pod"] != "note" || list[0].GetRuntimeHandler() != "" {
			t.Errorf("the %s of pods is %v", how, list)
		}
	}
	filter := &runtimeapi.ContainerFilter{PodSandboxId: c.pod, LabelSelector: map[string]string{"tier": "front"}}
	containers, err := c.Runtime.ListContainers(c.ctx, &runtimeapi.ListContainersRequest{Filter: filter})
	c.check(err)
	stream, err := c.Runtime.StreamContainers(c.ctx, &runtimeapi.StreamContainersRequest{Filter: filter})
	c.check(err)
	streamed, err := stream.Recv()
	c.check(err)
	for how, list := range map[string][]*runtimeapi.Container{"list": containers.GetContainers(), "stream": streamed.GetContainers()} {
		if len(list) != 1 {
			t.Fatalf("the %s of containers is %v", how, list)
		}
		one := list[0]
		if one.GetId() != c.container || one.GetAnnotations()["container"] != "note" || one.GetMetadata().GetAttempt() != 3 ||
			one.GetImage().GetImage() != "registry.test/as/written:1" || !strings.Contains(one.GetImageRef(), "sha256:") && one.GetImageRef() == "" {
			t.Errorf("the container of the %s is %v", how, one)
		}
	}
}

// The stats of containers have their attributes and numbers, and every filter.
//
// cri: ContainerStats ListContainerStats StreamContainerStats ContainerStats.attributes
// cri: ContainerAttributes.id ContainerAttributes.metadata ContainerAttributes.labels
// cri: ContainerAttributes.annotations ContainerStatsFilter.id ContainerStatsFilter.label_selector
// cri: ContainerStatsFilter.pod_sandbox_id ContainerStatsResponse.stats ListContainerStatsRequest.filter
// cri: ListContainerStatsResponse.stats StreamContainerStatsRequest.filter
// cri: StreamContainerStatsResponse.container_stats ContainerStats.writable_layer FilesystemUsage.timestamp
// cri: FilesystemUsage.inodes_used MemoryUsage.timestamp
func TestContainerStatsFilters(t *testing.T) {
	c := newCounted(t)
	for name, test := range map[string]struct {
		filter *runtimeapi.ContainerStatsFilter
		want   int
	}{
		"none":            {nil, 1},
		"another id":      {&runtimeapi.ContainerStatsFilter{Id: c.pod}, 0},
		"another label":   {&runtimeapi.ContainerStatsFilter{LabelSelector: map[string]string{"tier": "back"}}, 0},
		"all of them":     {&runtimeapi.ContainerStatsFilter{Id: c.container, PodSandboxId: c.pod}, 1},
		"not all of them": {&runtimeapi.ContainerStatsFilter{Id: c.container, PodSandboxId: c.container}, 0},
	} {
		list, err := c.Runtime.ListContainerStats(c.ctx, &runtimeapi.ListContainerStatsRequest{Filter: test.filter})
		c.check(err)
		stream, err := c.Runtime.StreamContainerStats(c.ctx, &runtimeapi.StreamContainerStatsRequest{Filter: test.filter})
		c.check(err)
		var streamed []*runtimeapi.ContainerStats
		for {
			piece, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				break
			}
			c.check(err)
			streamed = append(streamed, piece.GetContainerStats()...)
		}
		if len(list.GetStats()) != test.want || len(streamed) != test.want {
			t.Errorf("%s: %d listed, %d streamed, want %d", name, len(list.GetStats()), len(streamed), test.want)
		}
		for _, one := range append(list.GetStats(), streamed...) {
			c.attributes(one)
		}
	}
	one, err := c.Runtime.ContainerStats(c.ctx, &runtimeapi.ContainerStatsRequest{ContainerId: c.container})
	c.check(err)
	c.attributes(one.GetStats())
	layer := one.GetStats().GetWritableLayer()
	if layer.GetUsedBytes().GetValue() == 0 || layer.GetInodesUsed().GetValue() == 0 || layer.GetFsId().GetMountpoint() == "" || layer.GetTimestamp() == 0 {
		t.Errorf("the writable layer is %v", layer)
	}
	if memory := one.GetStats().GetMemory(); memory.GetWorkingSetBytes().GetValue() == 0 || memory.GetTimestamp() == 0 {
		t.Errorf("the memory is %v", memory)
	}
}

func (c *counted) attributes(stats *runtimeapi.ContainerStats) {
	c.t.Helper()
	a := stats.GetAttributes()
	if a.GetId() != c.container || a.GetMetadata().GetName() != "app" || a.GetLabels()["tier"] != "front" || a.GetAnnotations()["container"] != "note" {
		c.t.Errorf("the attributes are %v", a)
	}
}

// The stats of pods have their attributes, and every filter.
//
// cri: PodSandboxStats ListPodSandboxStats StreamPodSandboxStats PodSandboxStatsFilter.id
// cri: PodSandboxStatsFilter.label_selector PodSandboxStatsResponse.stats PodSandboxAttributes.id
// cri: PodSandboxAttributes.metadata PodSandboxAttributes.labels PodSandboxAttributes.annotations
// cri: StreamPodSandboxStatsRequest.filter ListPodSandboxStatsRequest.filter
// cri: ListPodSandboxStatsResponse.stats ProcessUsage.timestamp ProcessUsage.process_count
// cri: LinuxPodSandboxStats.containers PodSandboxStats.windows CpuUsage.timestamp LinuxPodSandboxStats.cpu
// cri: LinuxPodSandboxStats.process PodSandboxStats.attributes PodSandboxStats.linux
// cri: PodSandboxStatsRequest.pod_sandbox_id StreamPodSandboxStatsResponse.pod_sandbox_stats
// cri: ContainerStatsRequest.container_id
func TestPodStatsFilters(t *testing.T) {
	c := newCounted(t)
	for id, want := range map[string]int{"": 1, c.container: 0} {
		filter := &runtimeapi.PodSandboxStatsFilter{Id: id, LabelSelector: map[string]string{"app": "counted"}}
		list, err := c.Runtime.ListPodSandboxStats(c.ctx, &runtimeapi.ListPodSandboxStatsRequest{Filter: filter})
		c.check(err)
		stream, err := c.Runtime.StreamPodSandboxStats(c.ctx, &runtimeapi.StreamPodSandboxStatsRequest{Filter: filter})
		c.check(err)
		streamed, err := stream.Recv()
		if !errors.Is(err, io.EOF) {
			c.check(err)
		}
		if len(list.GetStats()) != want || len(streamed.GetPodSandboxStats()) != want {
			t.Errorf("id %q: %d listed, %d streamed, want %d", id, len(list.GetStats()), len(streamed.GetPodSandboxStats()), want)
		}
	}
	one, err := c.Runtime.PodSandboxStats(c.ctx, &runtimeapi.PodSandboxStatsRequest{PodSandboxId: c.pod})
	c.check(err)
	a := one.GetStats().GetAttributes()
	if a.GetId() != c.pod || a.GetMetadata().GetName() != "counted" || a.GetLabels()["app"] != "counted" || a.GetAnnotations()["pod"] != "note" {
		t.Errorf("the attributes are %v", a)
	}
	linux := one.GetStats().GetLinux()
	if linux.GetProcess().GetTimestamp() == 0 || linux.GetProcess().GetProcessCount().GetValue() < 2 || len(linux.GetContainers()) != 1 || linux.GetNetwork().GetDefaultInterface().GetName() != "eth0" {
		t.Errorf("the stats are %v", linux)
	}
	if one.GetStats().GetWindows() != nil || linux.GetCpu().GetTimestamp() <= 0 {
		t.Errorf("the stats are %v", one.GetStats())
	}
	_, err = c.Runtime.PodSandboxStats(c.ctx, &runtimeapi.PodSandboxStatsRequest{PodSandboxId: c.container})
	wantCode(t, err, codes.NotFound)
	_, err = c.Runtime.ContainerStats(c.ctx, &runtimeapi.ContainerStatsRequest{ContainerId: c.pod})
	wantCode(t, err, codes.NotFound)
}

// Every metric that is described is of its kind, has its labels and a time; pods
// and containers have theirs, listed and streamed.
//
// cri: ListMetricDescriptors ListMetricDescriptorsResponse.descriptors MetricDescriptor.help
// cri: MetricDescriptor.label_keys ListPodSandboxMetrics ListPodSandboxMetricsResponse.pod_metrics
// cri: StreamPodSandboxMetrics StreamPodSandboxMetricsResponse.pod_sandbox_metrics
// cri: PodSandboxMetrics.pod_sandbox_id PodSandboxMetrics.container_metrics PodSandboxMetrics.metrics
// cri: ContainerMetrics.container_id ContainerMetrics.metrics Metric.timestamp Metric.metric_type
// cri: Metric.label_values Metric.name Metric.value MetricDescriptor.name
func TestMetricsOfPods(t *testing.T) {
	c := newCounted(t)
	described, err := c.Runtime.ListMetricDescriptors(c.ctx, &runtimeapi.ListMetricDescriptorsRequest{})
	c.check(err)
	labels := make(map[string][]string)
	for _, d := range described.GetDescriptors() {
		if labels[d.GetName()] = d.GetLabelKeys(); d.GetHelp() == "" {
			t.Errorf("%s has no help", d.GetName())
		}
	}
	for _, name := range []string{"container_hugetlb_usage_bytes", "container_hugetlb_max_usage_bytes", "container_spec_memory_reservation_limit_bytes", "container_ulimits_soft"} {
		if labels[name] == nil {
			t.Errorf("%s, which critest wants, is not described", name)
		}
	}
	list, err := c.Runtime.ListPodSandboxMetrics(c.ctx, &runtimeapi.ListPodSandboxMetricsRequest{})
	c.check(err)
	stream, err := c.Runtime.StreamPodSandboxMetrics(c.ctx, &runtimeapi.StreamPodSandboxMetricsRequest{})
	c.check(err)
	streamed, err := stream.Recv()
	c.check(err)
	for how, pods := range map[string][]*runtimeapi.PodSandboxMetrics{"list": list.GetPodMetrics(), "stream": streamed.GetPodSandboxMetrics()} {
		at := slices.IndexFunc(pods, func(p *runtimeapi.PodSandboxMetrics) bool { return p.GetPodSandboxId() == c.pod })
		if at < 0 || len(pods[at].GetContainerMetrics()) != 1 || pods[at].GetContainerMetrics()[0].GetContainerId() != c.container {
			t.Fatalf("the %s is %v", how, pods)
		}
		found := make(map[string]*runtimeapi.Metric)
		for _, m := range append(pods[at].GetMetrics(), pods[at].GetContainerMetrics()[0].GetMetrics()...) {
			found[m.GetName()] = m
			if len(m.GetLabelValues()) != len(labels[m.GetName()]) || time.Since(time.Unix(0, m.GetTimestamp())) > time.Minute {
				t.Errorf("%s: labels %q for %q, of %d", m.GetName(), m.GetLabelValues(), labels[m.GetName()], m.GetTimestamp())
			}
		}
		if found["container_processes"].GetValue().GetValue() < 1 || found["container_processes"].GetMetricType() != runtimeapi.MetricType_GAUGE ||
			found["container_cpu_usage_seconds_total"].GetMetricType() != runtimeapi.MetricType_COUNTER || found["container_network_receive_bytes_total"] == nil {
			t.Errorf("the metrics of the %s are %v", how, found)
		}
	}
}
