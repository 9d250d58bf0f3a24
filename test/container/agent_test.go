package container

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	containers "github.com/containerd/containerd/api/services/containers/v1"
	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/services/version/v1"
	"github.com/containerd/containerd/api/types/task"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

// cAdvisor finds containers and pods on containerd's socket, as a kubelet with default gates asks for them.
func TestContainerdSocket(t *testing.T) {
	n := newNode(t)
	p := runPod(t, n, "web")
	id := p.run("app", forever)
	socket := filepath.Join(n.Dir, "containerd.sock")
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	check(t, err)
	defer conn.Close()
	ctx := t.Context()
	_, err = version.NewVersionClient(conn).Version(ctx, &emptypb.Empty{})
	check(t, err)

	get := func(id string) (*containers.Container, *task.Process) {
		c, err := containers.NewContainersClient(conn).Get(ctx, &containers.GetContainerRequest{ID: id})
		check(t, err)
		process, err := tasks.NewTasksClient(conn).Get(ctx, &tasks.GetRequest{ContainerID: id})
		check(t, err)
		return c.GetContainer(), process.GetProcess()
	}
	c, first := get(id)
	same(t, "kind", c.GetLabels()["io.cri-containerd.kind"], "container")
	same(t, "pid", int(first.GetPid()), p.info(id).PID)
	same(t, "status", first.GetStatus(), task.Status_RUNNING)
	check(t, p.stop(id, 0))
	_, first = get(id)
	same(t, "status after the end", first.GetStatus(), task.Status_STOPPED)
	same(t, "exit status", first.GetExitStatus(), 137)
	sb, _ := get(p.id)
	same(t, "kind of the pod", sb.GetLabels()["io.cri-containerd.kind"], "sandbox")
	for _, unknown := range []string{strings.Repeat("ab", 32), id[:12], ""} {
		_, err := containers.NewContainersClient(conn).Get(ctx, &containers.GetContainerRequest{ID: unknown})
		same(t, "an unknown id", status.Code(err), codes.NotFound)
	}
	_, err = containers.NewContainersClient(conn).List(ctx, &containers.ListContainersRequest{})
	same(t, "another call", status.Code(err), codes.Unimplemented)

	// containerd starts later and takes its path: Status reports it, and the path stays when the daemon ends.
	check(t, os.Remove(socket))
	containerd, err := net.Listen("unix", socket)
	check(t, err)
	defer containerd.Close()
	wantLost := func(says string) {
		t.Helper()
		answer := nodetest.Call(t, n.Runtime.Status, &runtimeapi.StatusRequest{})
		conditions := fmt.Sprint(answer.GetStatus().GetConditions())
		harness.Want(t, strings.Contains(conditions, says), "the conditions are %s, want %q", conditions, says)
		report, _ := n.RunCommand("check") // it also reports the machine of the test
		line := regexp.MustCompile("(?m)^.*CadvisorReady.*" + says).FindString(report)
		harness.Want(t, line != "", "check does not report %q:\n%s", says, report)
	}
	wantLost("another runtime has taken it over")
	n.Stop()
	_, err = os.Lstat(socket)
	check(t, err)
	n.Start()
	wantLost("another process listens on it")
}

// agent recognises a container by the path of a process's cgroup, or by the mountinfo line of its /etc/hostname.
type agent struct {
	name, source string
	recognises   func(cgroup, hostname, container, pod string) bool
}

// agents are those whose functions cannot be called: their rules, written down in our own words.
func agents() []agent {
	return []agent{
		{
			"Falco", "falcosecurity/plugins container/src/matchers/cri.cpp", func(cgroup, _, container, _ string) bool {
				forms := regexp.MustCompile(`/(?:crio-)?([0-9a-f]{64})$|` +
					`/(?:cri-containerd|crio|docker)-([0-9a-f]{64})\.scope`)
				found := forms.FindStringSubmatch(cgroup)
				return found != nil && found[1]+found[2] == container
			},
		},
		{"Cilium", "cilium pkg/cgroups/manager/provider.go", func(cgroup, _, container, _ string) bool {
			forms := []string{container, "cri-containerd-" + container + ".scope", "crio-" + container + ".scope"}
			return slices.Contains(forms, filepath.Base(cgroup))
		}},
		{"Tetragon", "cilium/tetragon pkg/sensors/exec/procevents", func(cgroup, _, container, _ string) bool {
			leaf := filepath.Base(cgroup)
			leaf = leaf[strings.LastIndexAny(leaf, ":-")+1:]
			return len(leaf) >= 64 && leaf[:31] == container[:31]
		}},
		{
			"OpenTelemetry for Java", "opentelemetry-java-instrumentation CgroupV2ContainerIdExtractor",
			func(_, hostname, _, pod string) bool { // containerd's path has the id of the sandbox there, too
				return regexp.MustCompile(`[0-9a-f]{64}`).FindString(hostname) == pod
			},
		},
	}
}

// Agents do not ask the runtime: they recognise containers by names that containerd and CRI-O have made usual.
func TestAgentsRecogniseContainers(t *testing.T) {
	p := newPod(t)
	program := filepath.Join(p.Binaries(), "agents")
	id := p.run("app", forever, func(c *runtimeapi.ContainerConfig) {
		c.Mounts = append(c.Mounts, &runtimeapi.Mount{HostPath: program, ContainerPath: "/agents", Readonly: true})
	})
	path := p.info(id).CgroupsPath
	hostname := p.exec(id, "grep ' /etc/hostname ' /proc/self/mountinfo")
	for _, one := range agents() {
		t.Run(one.name, func(t *testing.T) {
			harness.Want(t, one.recognises(path, hostname, id, p.id),
				"container %s of %s is unknown to %s: %s and %s", id, p.id, one.source, path, hostname)
		})
	}
	output, err := exec.Command(program, filepath.Join(p.Dir, "containerd.sock"), path).CombinedOutput()
	harness.Need(t, err == nil, "agents %s: %v: %s", path, err, output)
	same(t, "by the path", string(output), "Datadog "+id+"\ncAdvisor "+id+"\n")
	if !cgroup.Unified() { // on version 2 a container does not see its path, as with containerd
		same(t, "in the container", p.exec(id, "/agents"), "OpenTelemetry "+id)
	}
}
