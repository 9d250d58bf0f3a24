package container

import (
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestLife(t *testing.T) {
	p := newPod(t)
	config := shell("app", "echo hello; exit 3")
	config.Labels, config.Annotations = map[string]string{"a": "b"}, map[string]string{"c": "d"}
	id := p.create(config)
	s := p.status(id)
	if s.State != created || s.CreatedAt == 0 || s.StartedAt != 0 || s.FinishedAt != 0 || s.Reason != "" {
		t.Errorf("created: %v", s)
	}
	if s.Image.Image != imageName || !strings.HasPrefix(s.ImageId, "sha256:") || s.ImageRef == "" || s.Labels["a"] != "b" || s.Annotations["c"] != "d" {
		t.Errorf("what it was made from: %v", s)
	}
	same(t, "log path", s.LogPath, p.config.LogDirectory+"/app.log")
	wantCode(t, p.execErr(id), codes.FailedPrecondition)
	check(t, p.start(id))
	p.wantExit(id, 3, "Error")
	wantCode(t, p.start(id), codes.FailedPrecondition)
	wantCode(t, p.execErr(id), codes.FailedPrecondition)
	if stdout, _ := p.logs(id); stdout != "hello\n" {
		t.Errorf("log: %q", stdout)
	}
	check(t, p.stop(id, 10))
	check(t, p.remove(id))
	check(t, p.remove(id))
	check(t, p.stop(id, 0))
	_, err := p.Runtime.ContainerStatus(limited(t), &runtimeapi.ContainerStatusRequest{ContainerId: id})
	wantCode(t, err, codes.NotFound)
	if left := p.list(nil); len(left) != 0 {
		t.Errorf("listed: %v", left)
	}
}

func (p *pod) execErr(id string) error {
	_, err := p.tryExec(id, 0, "true")
	return err
}

func TestExits(t *testing.T) {
	p := newPod(t)
	p.wantExit(p.run("completed", "true"), 0, "Completed")
	p.wantExit(p.run("error", "exit 255"), 255, "Error")
	killed := p.run("signal", forever)
	check(t, unix.Kill(p.info(killed).PID, unix.SIGKILL))
	p.wantExit(killed, 137, "Error")
	// Quick ones: the times must not be swapped, however soon it ends.
	for i := range 10 {
		p.wantExit(p.run("quick", "exit 7", attempt(uint32(i))), 7, "Error")
	}
	oom := p.run("oom", "tail /dev/zero", memory(16<<20))
	p.wantExit(oom, 137, "OOMKilled")
}

func TestStartError(t *testing.T) {
	p := newPod(t)
	for name, command := range map[string][]string{"absent": {"/no/such"}, "in no path": {"nosuch"}, "directory": {"/etc"}, "no program": {"/etc/passwd"}} {
		config := shell(strings.ReplaceAll(name, " ", "-"), "")
		config.Command = command
		id, err := p.tryCreate(config)
		if err == nil {
			err = p.start(id)
		}
		if err == nil || !strings.Contains(err.Error(), command[0]) {
			t.Errorf("%s: the error does not name the program: %v", name, err)
		}
		if id == "" {
			continue
		}
		p.wantExit(id, 128, "StartError")
		if message := p.status(id).Message; !strings.Contains(message, command[0]) {
			t.Errorf("%s: message %q", name, message)
		}
		check(t, p.remove(id))
	}
}

func TestListFilters(t *testing.T) {
	n := newNode(t)
	a, b := runPod(t, n, "a"), runPod(t, n, "b")
	label := func(c *runtimeapi.ContainerConfig) { c.Labels = map[string]string{"tier": "web", "x": "y"} }
	first, second, third := a.run("one", forever, label), a.create(shell("two", "true")), b.run("one", "true", label)
	a.awaitExit(third)
	state := func(s runtimeapi.ContainerState) *runtimeapi.ContainerStateValue {
		return &runtimeapi.ContainerStateValue{State: s}
	}
	for name, c := range map[string]struct {
		filter *runtimeapi.ContainerFilter
		want   []string
	}{
		"all":        {nil, []string{third, second, first}},
		"empty":      {&runtimeapi.ContainerFilter{}, []string{third, second, first}},
		"id":         {&runtimeapi.ContainerFilter{Id: second}, []string{second}},
		"short id":   {&runtimeapi.ContainerFilter{Id: second[:12]}, []string{second}},
		"pod":        {&runtimeapi.ContainerFilter{PodSandboxId: a.id}, []string{second, first}},
		"state":      {&runtimeapi.ContainerFilter{State: state(exited)}, []string{third}},
		"created":    {&runtimeapi.ContainerFilter{State: state(created)}, []string{second}},
		"label":      {&runtimeapi.ContainerFilter{LabelSelector: map[string]string{"tier": "web"}}, []string{third, first}},
		"two":        {&runtimeapi.ContainerFilter{PodSandboxId: b.id, LabelSelector: map[string]string{"tier": "web", "x": "y"}}, []string{third}},
		"no such":    {&runtimeapi.ContainerFilter{Id: "nosuch"}, nil},
		"contradict": {&runtimeapi.ContainerFilter{Id: first, PodSandboxId: b.id}, nil},
	} {
		var got []string
		for _, listed := range a.list(c.filter) {
			got = append(got, listed.Id)
		}
		same(t, name, strings.Join(got, " "), strings.Join(c.want, " "))
	}
	listed := a.list(&runtimeapi.ContainerFilter{Id: first})[0]
	if listed.State != running || listed.PodSandboxId != a.id || listed.Labels["tier"] != "web" || listed.ImageId == "" || listed.CreatedAt == 0 {
		t.Errorf("listed: %v", listed)
	}
	stream, err := n.Runtime.StreamContainers(limited(t), &runtimeapi.StreamContainersRequest{})
	check(t, err)
	answer, err := stream.Recv()
	check(t, err)
	if len(answer.Containers) != 3 {
		t.Errorf("streamed: %v", answer)
	}
}

func TestVerboseStatus(t *testing.T) {
	p := newPod(t)
	id := p.run("app", forever, func(c *runtimeapi.ContainerConfig) {
		c.Envs = []*runtimeapi.KeyValue{{Key: "SECRET", Value: []byte("x")}}
	})
	i := p.info(id)
	if i.SandboxID != p.id || i.Snapshot == "" || i.RuntimeSpec.Process.Args[0] != "/bin/sh" || len(i.RuntimeSpec.Process.Env) != 0 {
		t.Errorf("verbose: %+v", i)
	}
	eventually(t, "the program runs", func() bool { return procStatus(t, i.PID, "Name") == "sh" })
	if len(p.inCgroup(i.CgroupsPath)) == 0 {
		t.Errorf("no process is in %s", i.CgroupsPath)
	}
}

func TestNames(t *testing.T) {
	p := newPod(t)
	first := p.create(shell("app", "true"))
	_, err := p.tryCreate(shell("app", "true"))
	wantCode(t, err, codes.AlreadyExists)
	p.create(shell("app", "true", attempt(1)))
	check(t, p.remove(first))
	p.create(shell("app", "true"))
}

func TestCodes(t *testing.T) {
	p := newPod(t)
	_, err := p.tryCreate(nil)
	wantCode(t, err, codes.InvalidArgument)
	_, err = p.tryCreate(shell("", "true"))
	wantCode(t, err, codes.InvalidArgument)
	_, err = p.tryCreate(shell("app", "true", func(c *runtimeapi.ContainerConfig) { c.Image.Image = "no.such/image:1" }))
	wantCode(t, err, codes.NotFound)
	_, err = p.tryCreate(shell("app", "true", func(c *runtimeapi.ContainerConfig) { c.Linux.SecurityContext.Privileged = true }))
	wantCode(t, err, codes.InvalidArgument)
	nowhere := &pod{Node: p.Node, t: t, id: "nosuch"}
	_, err = nowhere.tryCreate(shell("app", "true"))
	wantCode(t, err, codes.NotFound)
	wantCode(t, p.start("nosuch"), codes.NotFound)
	wantCode(t, p.start(""), codes.InvalidArgument)
	wantCode(t, p.execErr("nosuch"), codes.NotFound)
	_, err = p.Runtime.ReopenContainerLog(limited(t), &runtimeapi.ReopenContainerLogRequest{ContainerId: "nosuch"})
	wantCode(t, err, codes.NotFound)
	_, err = p.Runtime.UpdateContainerResources(limited(t), &runtimeapi.UpdateContainerResourcesRequest{ContainerId: "nosuch"})
	wantCode(t, err, codes.NotFound)
	id := p.run("app", forever)
	_, err = p.tryExec(id, 0)
	wantCode(t, err, codes.InvalidArgument)
	check(t, p.stop("nosuch", 1))
	check(t, p.remove("nosuch"))
	_, err = p.Runtime.StopPodSandbox(limited(t), &runtimeapi.StopPodSandboxRequest{PodSandboxId: p.id})
	check(t, err)
	_, err = p.tryCreate(shell("late", "true"))
	wantCode(t, err, codes.FailedPrecondition)
}

func TestImageRemovedWhileInUse(t *testing.T) {
	p := newPod(t)
	id, waits := p.run("app", forever), p.create(shell("waits", "ls /bin/busybox"))
	_, err := p.Image.RemoveImage(limited(t), &runtimeapi.RemoveImageRequest{Image: &runtimeapi.ImageSpec{Image: imageName}})
	check(t, err)
	time.Sleep(100 * time.Millisecond) // for the collector of what is not used
	same(t, "exec", p.exec(id, "cat /etc/passwd | head -n 1"), "root:x:0:0::/root:/bin/sh")
	check(t, p.start(waits))
	p.wantExit(waits, 0, "Completed")
}
