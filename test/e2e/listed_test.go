package e2e

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// heavy is as much as a pod or a container may carry, and an annotation that its
// kubelet needs.
func heavy() (labels, annotations map[string]string) {
	return map[string]string{"much": strings.Repeat("y", 256<<10-4)}, map[string]string{"much": strings.Repeat("x", 255<<10), "short": "kept"}
}

// heavies are more of them than one message holds; manyHeavies in make test-crash.
const heavies, manyHeavies = 33, 1000

// However much the pods carry, all of them are listed: as one message of what the
// kubelet reads, without the texts that do not fit, and as a stream with all.
func TestNoPodBreaksTheList(t *testing.T) {
	n, heavies := newNode(t), heavies
	if os.Getenv("MINICRI_TEST_WHOLE") != "" {
		heavies = manyHeavies
	}
	ctx := harness.Limited(t, 10*time.Minute)
	largest := grpc.MaxCallRecvMsgSize(16 << 20)
	for i := range heavies {
		n.RunPod(n.PodConfig(fmt.Sprint("heavy-", i), harness.HostNetwork(), func(c *runtimeapi.PodSandboxConfig) { c.Labels, c.Annotations = heavy() }))
	}
	n.RunPod(n.PodConfig("light", harness.HostNetwork()))
	n.Restart() // what is there is listed after a restart too
	pods, err := n.Runtime.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{}, largest)
	check(t, err)
	kept := 0
	for _, pod := range pods.Items {
		kept += strings.Count(pod.Annotations["short"], "kept")
	}
	if len(pods.Items) != heavies+1 || kept != heavies {
		t.Errorf("%d pods are listed, %d with their short annotation", len(pods.Items), kept)
	}
	stats, err := n.Runtime.ListPodSandboxStats(ctx, &runtimeapi.ListPodSandboxStatsRequest{}, largest)
	if err != nil || len(stats.Stats) != heavies+1 {
		t.Errorf("statistics of %d pods, %v", len(stats.GetStats()), err)
	}
	stream, err := n.Runtime.StreamPodSandboxes(ctx, &runtimeapi.StreamPodSandboxesRequest{}, largest)
	check(t, err)
	whole := 0
	for {
		message, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		check(t, err)
		for _, pod := range message.PodSandboxes {
			if len(pod.Annotations["much"]) == 255<<10 && len(pod.Labels["much"]) == 256<<10-4 {
				whole++
			}
		}
	}
	if whole != heavies {
		t.Errorf("the stream has %d pods with all of their texts, want %d", whole, heavies)
	}
}

// The same for containers; what no list can leave out is refused with its field.
func TestNoContainerBreaksTheList(t *testing.T) {
	n := newNode(t)
	n.ImportBusybox()
	ctx := harness.Limited(t, 10*time.Minute)
	largest := grpc.MaxCallRecvMsgSize(16 << 20)
	sandbox := n.PodConfig("web")
	pod := n.RunPod(sandbox)
	create := func(name string, change func(*runtimeapi.ContainerConfig)) error {
		config := &runtimeapi.ContainerConfig{
			Metadata: &runtimeapi.ContainerMetadata{Name: name}, Image: &runtimeapi.ImageSpec{Image: harness.BusyboxImage}, Command: []string{"true"},
			Linux: &runtimeapi.LinuxContainerConfig{},
		}
		change(config)
		_, err := n.Runtime.CreateContainer(ctx, &runtimeapi.CreateContainerRequest{PodSandboxId: pod, SandboxConfig: sandbox, Config: config})
		return err
	}
	for i := range heavies {
		check(t, create(fmt.Sprint("heavy-", i), func(c *runtimeapi.ContainerConfig) { c.Labels, c.Annotations = heavy() }))
	}
	containers, err := n.Runtime.ListContainers(ctx, &runtimeapi.ListContainersRequest{}, largest)
	if err != nil || len(containers.GetContainers()) != heavies || containers.Containers[0].Annotations["short"] != "kept" {
		t.Errorf("%d containers are listed, %v", len(containers.GetContainers()), err)
	}
	if _, err := n.Runtime.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: pod}, largest); err != nil {
		t.Error(err)
	}
	err = create("endless", func(c *runtimeapi.ContainerConfig) { c.Image.UserSpecifiedImage = strings.Repeat("i", 8<<20) })
	if code := status.Code(err); code != codes.ResourceExhausted && code != codes.InvalidArgument || !strings.Contains(err.Error(), "config.image") {
		t.Errorf("a container with an image name of 8 MiB: %.300v", err)
	}
}
