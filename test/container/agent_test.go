package container

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
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
	answer := nodetest.Call(t, n.Runtime.Status, &runtimeapi.StatusRequest{})
	conditions := fmt.Sprint(answer.GetStatus().GetConditions())
	const says = "another runtime has taken it over"
	harness.Want(t, strings.Contains(conditions, says), "the conditions are %s", conditions)
	n.Stop()
	_, err = os.Lstat(socket)
	check(t, err)
}
