package e2e

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

// cri: PodSandbox.id PodSandbox.created_at PodSandbox.labels PodSandbox.metadata PodSandboxStatus.labels PodSandboxConfig.labels PodSandboxStatus.annotations
// cri: RemovePodSandbox RunPodSandbox StopPodSandbox PodSandboxStatus.id PodSandboxStatus.runtime_handler RunPodSandboxRequest.runtime_handler
// cri: RunPodSandboxResponse.pod_sandbox_id PodSandboxStatusResponse.containers_statuses PodSandboxStatusResponse.timestamp
// cri: PodSandbox.annotations PodSandbox.runtime_handler RunPodSandboxRequest.config PodSandboxStatusRequest.verbose
// cri: PodSandboxStatus PodSandboxStatusRequest.pod_sandbox_id PodSandboxStatus.created_at
func TestLifeOfAPod(t *testing.T) {
	n := newNode(t)
	config := n.PodConfig("web", nodetest.Attempt(3))
	config.Annotations = map[string]string{"example.org/a b": "x=\"1\"\n\tü", "empty": ""}
	config.Labels["app"] = "web"
	_, err := runBy(t, n, config, "kata")
	nodetest.WantCode(t, err, codes.InvalidArgument)
	id, err := runBy(t, n, config, "runc")
	check(t, err)
	start := id[:10] // any unique start of an id will do

	before := time.Now().UnixNano()
	answer := nodetest.Call(t, n.Runtime.PodSandboxStatus, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: start})
	at, status := answer.Timestamp, answer.Status
	harness.Want(t, at >= before, "asked at %d, got %v", before, answer)
	harness.Want(t, at <= time.Now().UnixNano(), "asked at %d, got %v", before, answer)
	harness.Want(t, len(answer.ContainersStatuses) == 0, "asked at %d, got %v", before, answer)
	harness.Want(t, status.Id == id, "got %v", status)
	harness.Want(t, status.State == runtimeapi.PodSandboxState_SANDBOX_READY, "got %v", status)
	harness.Want(t, status.CreatedAt > 0, "got %v", status)
	harness.Want(t, status.RuntimeHandler == "runc", "got %v", status)
	harness.Want(t, status.Metadata.Attempt == 3, "got %v", status)
	want := &runtimeapi.PodSandbox{
		Id: id, Metadata: config.Metadata, Labels: config.Labels, Annotations: config.Annotations,
		State: status.State, CreatedAt: status.CreatedAt, RuntimeHandler: "runc",
	}
	said := &runtimeapi.PodSandbox{
		Id: status.Id, Metadata: status.Metadata, Labels: status.Labels, Annotations: status.Annotations,
		State: status.State, CreatedAt: status.CreatedAt, RuntimeHandler: status.RuntimeHandler,
	}
	pod := list(t, n, nil)[0]
	harness.Want(t, proto.Equal(pod, want) && proto.Equal(said, want), "want %v, listed as %v, status %v", want, pod, status)
	harness.Same(t, "addresses of host-local", addresses(t, n), []string{status.Network.Ip})
	info := verbose(t, n, id)
	harness.Want(t, info.PID > 1, "got %+v", info)
	harness.Want(t, info.NetNamespace != "", "got %+v", info)
	harness.Want(t, !info.NetNamespaceClosed, "got %+v", info)
	harness.Want(t, info.RuntimeSpec.OCIVersion != "", "got %+v", info)
	harness.Want(t, len(info.CNIResult) >= 10, "got %+v", info)
	harness.Want(t, len(info.Timeline) >= 8, "got %+v", info)
	var stored runtimeapi.PodSandboxConfig
	err = protojson.Unmarshal(info.Config, &stored)
	harness.Want(t, err == nil && proto.Equal(&stored, config), "the config is %v, %v", &stored, err)

	check(t, stop(t, n, start))
	status = podStatus(t, n, id)
	harness.Want(t, status.State == runtimeapi.PodSandboxState_SANDBOX_NOTREADY, "after Stop: %v", status)
	harness.Want(t, status.Network.GetIp() == "", "after Stop: %v", status)
	harness.Want(t, verbose(t, n, id).NetNamespaceClosed, "after Stop: %v", status)
	wantAddresses(t, n, 0)
	check(t, remove(t, n, start))
	nodetest.WantCode(t, nodetest.Err(t, n.Runtime.PodSandboxStatus, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id}), codes.NotFound)
	wantPods(t, n)
}

// cri: ListPodSandbox PodSandboxFilter.id PodSandboxFilter.label_selector PodSandboxFilter.state PodSandboxStateValue.state
// cri: StreamPodSandboxes StreamPodSandboxesRequest.filter StreamPodSandboxesResponse.pod_sandboxes ListPodSandboxRequest.filter
func TestListFilters(t *testing.T) {
	n := newNode(t)
	a, b := n.RunPod(n.PodConfig("a")), n.RunPod(n.PodConfig("b"))
	check(t, stop(t, n, b))
	ready, notReady := &runtimeapi.PodSandboxStateValue{}, &runtimeapi.PodSandboxStateValue{State: runtimeapi.PodSandboxState_SANDBOX_NOTREADY}
	label := func(value string) map[string]string { return map[string]string{"io.kubernetes.pod.name": value} }
	for name, c := range harness.Sorted(map[string]struct {
		filter *runtimeapi.PodSandboxFilter
		want   []string
	}{
		"none":             {nil, []string{b, a}},
		"empty":            {&runtimeapi.PodSandboxFilter{}, []string{b, a}},
		"id":               {&runtimeapi.PodSandboxFilter{Id: a}, []string{a}},
		"start of an id":   {&runtimeapi.PodSandboxFilter{Id: a[:12]}, []string{a}},
		"ready":            {&runtimeapi.PodSandboxFilter{State: ready}, []string{a}},
		"not ready":        {&runtimeapi.PodSandboxFilter{State: notReady}, []string{b}},
		"label":            {&runtimeapi.PodSandboxFilter{LabelSelector: label("b")}, []string{b}},
		"label and state":  {&runtimeapi.PodSandboxFilter{LabelSelector: label("b"), State: ready}, nil},
		"label of nothing": {&runtimeapi.PodSandboxFilter{LabelSelector: label("c")}, nil},
	}) {
		listed, streamed := podIDs(list(t, n, c.filter)), podIDs(streamPods(t, n, c.filter))
		harness.Want(t, slices.Equal(listed, c.want) && slices.Equal(streamed, c.want),
			"%s: want %v, listed %v, streamed %v", name, c.want, listed, streamed)
	}
}

func podIDs(pods []*runtimeapi.PodSandbox) (ids []string) {
	for _, pod := range pods {
		ids = append(ids, pod.Id)
	}
	return ids
}

// receive collects what the messages of a stream have; one that has nothing is an error.
func receive[M, E any](t *testing.T, stream interface{ Recv() (M, error) }, err error, of func(M) []E) (all []E) {
	for {
		check(t, err)
		var message M
		if message, err = stream.Recv(); errors.Is(err, io.EOF) {
			return all
		}
		harness.Want(t, err != nil || len(of(message)) != 0, "a message of the stream has nothing")
		all = append(all, of(message)...)
	}
}

func streamPods(t *testing.T, n *nodetest.Node, filter *runtimeapi.PodSandboxFilter) []*runtimeapi.PodSandbox {
	stream, err := n.Runtime.StreamPodSandboxes(harness.Limited(t), &runtimeapi.StreamPodSandboxesRequest{Filter: filter})
	return receive(t, stream, err, (*runtimeapi.StreamPodSandboxesResponse).GetPodSandboxes)
}

// each calls do for all numbers below count at once.
func each(count int, do func(i int)) {
	var all sync.WaitGroup
	for i := range count {
		all.Go(func() { do(i) })
	}
	all.Wait()
}

// What the containers of a pod share is as asked for, or the node's: the names of the host, DNS, hosts, shared
// memory. What a pod that has ended keeps in memory is given back when it is stopped: the kubelet keeps its sandbox
// for as long as the pod object lives. Its log directory, which has the kubelet's log of its end, stays.
//
// cri: PodSandboxConfig.hostname DNSConfig.options DNSConfig.searches DNSConfig.servers PodSandboxConfig.dns_config
// cri: PodSandboxConfig.log_directory
func TestFilesOfAPod(t *testing.T) {
	n := newNode(t)
	own, err := os.Hostname()
	check(t, err)
	for name, c := range harness.Sorted(map[string]struct {
		change           nodetest.PodOption
		hostname, resolv string
	}{
		"full": {func(c *runtimeapi.PodSandboxConfig) {
			c.Hostname = "web-0.example"
			c.DnsConfig = &runtimeapi.DNSConfig{Servers: []string{"10.96.0.10", "fd00::53"}, Searches: []string{"a.svc", "b.example"}, Options: []string{"ndots:5", "edns0"}}
		}, "web-0.example", "search a.svc b.example\nnameserver 10.96.0.10\nnameserver fd00::53\noptions ndots:5 edns0\n"},
		"empty": {func(c *runtimeapi.PodSandboxConfig) { c.DnsConfig = &runtimeapi.DNSConfig{} }, "empty", ""},
		"host":  {nodetest.HostNetwork(), own, string(harness.Read(t, "/etc/resolv.conf"))},
	}) {
		config := n.PodConfig(name, c.change)
		config.LogDirectory = filepath.Join(n.Logs, name, "below")
		id := n.RunPod(config)
		dir := filepath.Join(n.State, "sandboxes", id)
		for file, want := range harness.Sorted(map[string]string{"hostname": c.hostname + "\n", "resolv.conf": c.resolv, "hosts": string(harness.Read(t, "/etc/hosts"))}) {
			harness.Same(t, name+": "+file, string(harness.Read(t, filepath.Join(dir, id, file))), want)
		}
		var uts unix.Utsname
		inside(t, pausePID(t, n, id), "uts", func() error { return unix.Uname(&uts) })
		harness.Same(t, name+": the host in pause's namespace", unix.ByteSliceToString(uts.Nodename[:]), c.hostname)
		var shm unix.Statfs_t
		check(t, unix.Statfs(filepath.Join(dir, "shm"), &shm))
		harness.Want(t, shm.Type == unix.TMPFS_MAGIC && shm.Blocks*uint64(shm.Bsize) == 64<<20,
			"%s: shm is of type %x with %d bytes", name, shm.Type, shm.Blocks*uint64(shm.Bsize))
		check(t, os.WriteFile(filepath.Join(dir, "shm", "much"), make([]byte, 8<<20), 0o600))
		check(t, stop(t, n, id))
		mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
		harness.Want(t, err == nil && len(mounts) == 0, "%s: a stopped pod keeps the mounts %v, %v", name, mounts, err)
		check(t, remove(t, n, id))
		info, err := os.Stat(config.LogDirectory)
		harness.Want(t, err == nil && info.Mode() == os.ModeDir|0o755, "%s: the log directory: %v, %v", name, info, err)
	}
}

// A log directory on a mount whose server is gone ends its own call at the limit, again and again, and holds
// up neither another pod nor the end of the daemon.
func TestLogDirectoryOnADeadMount(t *testing.T) {
	const short, long = "run = \"2s\"\ncni_add = \"1s\"\n", "run = \"2m\"\ncni_add = \"1m\"\n"
	n := newNode(t, nodetest.Config("[limits]\nreload = \"20ms\"\nshutdown = \"2s\"\n"+long))
	reload(t, n, long, short) // only now: the daemon's own first pause has these limits too
	config := n.PodConfig("web")
	config.LogDirectory = filepath.Join(harness.DeadMount(t), "logs")
	for range 2 {
		_, err := run(t, n, config)
		harness.Want(t, !(status.Code(err) != codes.Unavailable && status.Code(err) != codes.DeadlineExceeded),
			"the error does not name the directory: %v", err)
		harness.Want(t, strings.Contains(err.Error(), config.LogDirectory),
			"the error does not name the directory: %v", err)
	}
	reload(t, n, short, long)
	n.RemovePod(n.RunPod(n.PodConfig("other")))
	n.RemovePod(n.RunPod(n.PodConfig("web")))
	done := begin(harness.Limited(t), n, config)
	harness.Eventually(t, "the verbose status says that it is under way", func() bool {
		building := nodetest.Info[[]struct{ Name string }](t, n, "building")
		return len(building) == 1 && building[0].Name == "test/web"
	})
	n.Stop()
	harness.WantError(t, <-done)
	n.Start()
	wantPods(t, n)
}

// heavy is as much as a pod or a container may carry, as large as the API server takes it, and an annotation
// that its kubelet needs.
func heavy() (labels, annotations map[string]string) {
	return map[string]string{"much": strings.Repeat("y", 256<<10-4)}, map[string]string{"much": strings.Repeat("x", 256<<10), "short": "kept"}
}

// heavies are more of them than one message holds; manyHeavies in make test-crash.
const heavies, manyHeavies = 33, 1000

// However much the pods carry, all of them are listed: as one message of what the kubelet reads, without the
// texts that do not fit, and as a stream with all.
func TestNoPodBreaksTheList(t *testing.T) {
	n, heavies := newNode(t), heavies
	if os.Getenv("MINICRI_TEST_WHOLE") != "" {
		heavies = manyHeavies
	}
	for i := range heavies {
		n.RunPod(n.PodConfig(fmt.Sprint("heavy-", i), nodetest.HostNetwork(), func(c *runtimeapi.PodSandboxConfig) { c.Labels, c.Annotations = heavy() }))
	}
	n.RunPod(n.PodConfig("light", nodetest.HostNetwork()))
	n.Restart() // what is there is listed after a restart too
	kept, whole, pods := 0, 0, list(t, n, nil)
	for _, pod := range pods {
		kept += strings.Count(pod.Annotations["short"], "kept")
	}
	harness.Want(t, len(pods) == heavies+1 && kept == heavies, "%d pods are listed, %d with their short annotation", len(pods), kept)
	stats, err := n.Runtime.ListPodSandboxStats(harness.Limited(t), &runtimeapi.ListPodSandboxStatsRequest{})
	harness.Want(t, err == nil && len(stats.Stats) == heavies+1, "statistics of %d pods, %v", len(stats.GetStats()), err)
	for _, pod := range streamPods(t, n, nil) {
		if len(pod.Annotations["much"]) == 256<<10 && len(pod.Labels["much"]) == 256<<10-4 {
			whole++
		}
	}
	harness.Want(t, whole == heavies, "the stream has %d pods with all of their texts, want %d", whole, heavies)
}
