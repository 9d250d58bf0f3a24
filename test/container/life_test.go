package container

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// cri: ContainerConfig.annotations ContainerStatus ContainerStatus.annotations ContainerStatus.image
// cri: ContainerStatus.image_id ContainerStatus.image_ref ContainerStatus.labels ContainerStatus.started_at
// cri: ContainerStatusRequest.container_id CreateContainer RemoveContainer StartContainer
func TestLife(t *testing.T) {
	p := newPod(t)
	config := shell("app", "echo hello; exit 3")
	config.Labels, config.Annotations = map[string]string{"a": "b"}, map[string]string{"c": "d"}
	id := p.create(config)
	s := p.status(id)
	if s.State != created || s.CreatedAt == 0 || s.StartedAt != 0 || s.FinishedAt != 0 || s.Reason != "" {
		t.Errorf("created: %v", s)
	}
	if s.Image.Image != harness.BusyboxImage || !strings.HasPrefix(s.ImageId, "sha256:") || s.ImageRef == "" || s.Labels["a"] != "b" || s.Annotations["c"] != "d" {
		t.Errorf("what it was made from: %v", s)
	}
	same(t, "log path", s.LogPath, p.config.LogDirectory+"/app.log")
	check(t, p.execErr(id)) // also before the start
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

// A program that cannot be executed, for whatever reason, is an error of Start, as
// with other runtimes: the kubelet shows what Create says as a fault of the node.
//
// cri: ContainerStatus.message
func TestStartError(t *testing.T) {
	p := newPod(t)
	wrong := filepath.Join(p.Dir, "wrong-architecture")
	check(t, os.WriteFile(wrong, foreignProgram(), 0o755))
	for name, c := range map[string]struct {
		says   string
		change option
	}{
		"absent":             {"/no/such", command("/no/such")},
		"in-no-path":         {"nosuch", command("nosuch")},
		"directory":          {"/etc", command("/etc")},
		"not-executable":     {`exec: "/etc/passwd": permission denied`, command("/etc/passwd")},
		"wrong-architecture": {"/wrong: exec format error", all(command("/wrong"), mounted(wrong, "/wrong"))},
		"on-a-terminal":      {"/wrong: exec format error", all(command("/wrong"), mounted(wrong, "/wrong"), func(c *runtimeapi.ContainerConfig) { c.Tty = true })},
		"no-directory":       {"/etc/passwd", func(c *runtimeapi.ContainerConfig) { c.WorkingDir = "/etc/passwd" }},
	} {
		t.Run(name, func(t *testing.T) {
			p.t = t
			id := p.create(shell(name, "true", c.change))
			if s := p.status(id); s.State != created || s.Reason != "" || s.ExitCode != 0 {
				t.Errorf("before its start: %v", s)
			}
			if err := p.start(id); err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("the error does not say %q: %v", c.says, err)
			}
			p.wantExit(id, 128, "StartError")
			// The code and the reason say of what kind it is.
			if message := p.status(id).Message; !strings.Contains(message, c.says) || strings.Contains(message, "precondition") {
				t.Errorf("message %q", message)
			}
			check(t, p.remove(id))
		})
	}
	p.t = t
}

// The failure is known when the container is made, and survives the daemon and
// the shim until someone starts the container, or stops it.
//
// cri: LinuxContainerResources.cpu_shares
func TestStartErrorOutlivesDaemonAndShim(t *testing.T) {
	p := newPod(t)
	witness := p.run("witness", forever)
	started, stopped := p.create(shell("started", "", command("/no/such"))), p.create(shell("stopped", "", command("/no/such")))
	p.Kill()
	p.killShim()
	p.Start()
	for _, id := range []string{started, stopped} {
		if s := p.status(id); s.State != created {
			t.Errorf("after a restart: %v", s)
		}
	}
	wantCode(t, p.update(started, &runtimeapi.LinuxContainerResources{CpuShares: 100}), codes.FailedPrecondition)
	if err := p.start(started); err == nil {
		t.Error("the start succeeded")
	}
	check(t, p.stop(stopped, 10))
	p.Kill()
	p.Start()
	for _, id := range []string{started, stopped} {
		p.wantExit(id, 128, "StartError")
		check(t, p.remove(id))
	}
	eventually(t, "the other container is there", func() bool { return p.status(witness).State == running })
}

func command(words ...string) option {
	return func(c *runtimeapi.ContainerConfig) { c.Command = words }
}

func all(options ...option) option {
	return func(c *runtimeapi.ContainerConfig) {
		for _, each := range options {
			each(c)
		}
	}
}

// foreignProgram is a static program of another architecture: nothing but the
// header that says so (elf(5)).
func foreignProgram() []byte {
	const arm64, executable = 183, 2
	header := make([]byte, 64)
	copy(header, "\x7fELF\x02\x01\x01")
	header[16], header[18], header[20] = executable, arm64, 1
	return header
}

// cri: Container.created_at Container.image_id Container.labels Container.pod_sandbox_id
// cri: ContainerConfig.labels ContainerFilter.label_selector ListContainers StreamContainers
// cri: StreamContainersResponse.containers
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

// cri: ContainerConfig.envs KeyValue.key KeyValue.value
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

// cri: ReopenContainerLog ReopenContainerLogRequest.container_id UpdateContainerResources
// cri: UpdateContainerResourcesRequest.container_id
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
	check(t, p.stopPod())
	_, err = p.tryCreate(shell("late", "true"))
	wantCode(t, err, codes.FailedPrecondition)
}

// cri: RemoveImage RemoveImageRequest.image
func TestImageRemovedWhileInUse(t *testing.T) {
	p := newPod(t)
	id, waits := p.run("app", forever), p.create(shell("waits", "ls /bin/busybox"))
	_, err := p.Image.RemoveImage(limited(t), &runtimeapi.RemoveImageRequest{Image: &runtimeapi.ImageSpec{Image: harness.BusyboxImage}})
	check(t, err)
	time.Sleep(100 * time.Millisecond) // for the collector of what is not used
	same(t, "exec", p.exec(id, "cat /etc/passwd | head -n 1"), "root:x:0:0::/root:/bin/sh")
	check(t, p.start(waits))
	p.wantExit(waits, 0, "Completed")
}
