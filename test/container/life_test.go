package container

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

// cri: ContainerConfig.annotations ContainerStatus ContainerStatus.annotations ContainerStatus.image ContainerConfig.envs
// cri: ContainerStatus.finished_at KeyValue.key KeyValue.value ContainerStatus.image_id ContainerStatus.image_ref ContainerStatus.labels
// cri: ContainerStatus.started_at ContainerStatusRequest.container_id CreateContainer RemoveContainer StartContainer
// cri: CreateContainerRequest.pod_sandbox_id CreateContainerRequest.sandbox_config CreateContainerResponse.container_id
// cri: ContainerStatus.created_at
func TestLife(t *testing.T) {
	p := newPod(t)
	config := shell("app", "echo hello; until test -e /enough; do sleep 0.02; done; exit 3", env("SECRET", "x"))
	config.Labels, config.Annotations = map[string]string{"a": "b"}, map[string]string{"c": "d"}
	id := p.create(config)
	s := p.status(id)
	expect(t, s.State == created && s.CreatedAt != 0 && s.StartedAt == 0 && s.FinishedAt == 0 && s.Reason == "", "created: %v", s)
	same(t, "image, label, annotation", []string{s.Image.Image, s.Labels["a"], s.Annotations["c"]}, []string{nodetest.BusyboxImage, "b", "d"})
	expect(t, strings.HasPrefix(s.ImageId, "sha256:") && s.ImageRef != "", "what it was made from: %v", s)
	same(t, "log path", s.LogPath, p.config.LogDirectory+"/app.log")
	check(t, p.execErr(id, "true")) // also before the start
	wantCode(t, p.createErr(config), codes.AlreadyExists)
	check(t, p.stop(p.create(shell("app", "true", attempt(1))), 10)) // another of the name
	check(t, p.start(id))
	i := p.info(id)
	ran := i.RuntimeSpec.Process
	expect(t, i.SandboxID == p.id && i.Snapshot != "" && ran.Args[0] == "/bin/sh" && len(ran.Env) == 0, "verbose: %+v", i)
	p.awaitLine(id, "hello")
	expect(t, len(p.inCgroup(i.CgroupsPath)) > 0, "the program does not run in %s", i.CgroupsPath)
	same(t, "the program", harness.ProcStatus(t, i.PID, "Name"), "sh")
	p.letEnd(id)
	p.wantExit(id, 3, "Error")
	wantCode(t, p.start(id), codes.FailedPrecondition)
	wantCode(t, p.execErr(id, "true"), codes.FailedPrecondition)
	same(t, "log", p.stdout(id), "hello\n")
	check(t, p.stop(id, 10))
	check(t, p.remove(id))
	check(t, p.remove(id))
	check(t, p.stop(id, 0))
	wantCode(t, nodetest.Err(t, p.Runtime.ContainerStatus, &runtimeapi.ContainerStatusRequest{ContainerId: id}), codes.NotFound)
	stopped := p.list(nil) // before its start
	expect(t, len(stopped) == 1 && stopped[0].State == exited && p.status(stopped[0].Id).FinishedAt != 0, "listed: %v", stopped)
	check(t, p.remove(stopped[0].Id))
	p.create(config) // the name is free
}

// The log says once what has become of a pod and of its containers, each time with their
// names, and nothing of what was not there.
func TestLinesOfALife(t *testing.T) {
	n := newNode(t, nodetest.LevelOfFile())
	config := n.PodConfig("web")
	answer := nodetest.Call(t, n.Runtime.RunPodSandbox, &runtimeapi.RunPodSandboxRequest{Config: config, RuntimeHandler: "runc"})
	p := &pod{Node: n, t: t, id: answer.PodSandboxId, config: config}
	id := p.run("app", "tail /dev/zero", memory(16<<20))
	p.wantExit(id, 137, "OOMKilled")
	nodetest.Call(t, n.Runtime.Exec, &runtimeapi.ExecRequest{ContainerId: p.run("user", forever), Cmd: []string{"true"}, Stdout: true})
	unknown := shell("unknown", "true")
	unknown.Image.Image = "test.example/absent:1"
	wantError(t, p.createErr(unknown))
	for range 2 {
		n.RemovePod(p.id)
	}
	of := " namespace=test pod=web sandbox=" + p.id + " handler=runc"
	app := " container=app image=" + nodetest.BusyboxImage + " id=" + id
	for line, want := range harness.Sorted(map[string]int{
		`level=INFO msg="pod made" method=RunPodSandbox namespace=test pod=web handler=runc sandbox=` + p.id: 1, `level=INFO msg="pod removed" method=RemovePodSandbox` + of: 1,
		`msg="pod removed"`: 1,
		`level=INFO msg="container started" method=StartContainer` + of + app:                                              1,
		`level=INFO msg="container ended"` + of:                                                                            2,
		"container=app id=" + id + " image=" + nodetest.BusyboxImage + " code=137 reason=OOMKilled oom=true":               1,
		"level=INFO msg=exec method=Exec" + of + " container=user":                                                         1,
		`level=WARN msg="call failed" method=CreateContainer` + of + " container=unknown image=test.example/absent:1 took": 1,
	}) {
		got := strings.Count(n.Log(), line)
		expect(t, got == want, "%d lines with %s in\n%s", got, line, n.Log())
	}
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
	p.wantExit(p.run("oom", "tail /dev/zero", memory(16<<20)), 137, "OOMKilled")
}

// A program that cannot be executed, for whatever reason, is an error of Start, as
// with other runtimes: the kubelet shows what Create says as a fault of the node.
//
// attack: denial of service: a container with SYS_PTRACE writes bytes that are not UTF-8 as the output of an init in its pid namespace
// held: only that start fails, with an error without these bytes
//
// cri: ContainerStatus.message LinuxContainerResources.cpu_shares
func TestStartError(t *testing.T) {
	p := newPod(t)
	wrong := filepath.Join(p.Dir, "wrong-architecture")
	check(t, os.WriteFile(wrong, []byte("\x7fELF"+strings.Repeat("\x00", 60)), 0o755)) // elf(5)
	noInterpreter := filepath.Join(p.Dir, "no-interpreter")
	check(t, os.WriteFile(noInterpreter, []byte("#!/no/such\n"), 0o755))
	script := filepath.Join(p.Dir, "script")
	check(t, os.WriteFile(script, []byte("echo hi\n"), 0o755))
	mounts := all(command("/wrong"), mounted(wrong, "/wrong"))
	const format = ": exec format error; the file is a script without #! in its first line, or a program for another"
	for name, c := range harness.Sorted(map[string]struct {
		says   string
		change option
	}{
		"absent":             {"no such file or directory; the image has no such file", command("/no/such")},
		"in-no-path":         {`"nosuch": executable file not found in $PATH; check the command`, command("nosuch")},
		"empty":              {"; check the command", command("")},
		"directory":          {`"/etc": is a directory; the command is a directory`, command("/etc")},
		"not-executable":     {`exec: "/etc/passwd": permission denied; the file has no`, command("/etc/passwd")},
		"wrong-architecture": {"/wrong" + format, mounts},
		"script":             {"/script" + format, all(command("/script"), mounted(script, "/script"))},
		"no-interpreter":     {"; the file exists, but", all(command("/script"), mounted(noInterpreter, "/script"))},
		"on-a-terminal":      {"/wrong" + format, all(mounts, func(c *runtimeapi.ContainerConfig) { c.Tty = true })},
		"no-directory": {"; check the working directory", func(c *runtimeapi.ContainerConfig) {
			c.WorkingDir = "/etc/passwd"
		}},
		"over-a-file":      {"; a directory cannot be mounted over a file", mounted("/tmp", "/etc/passwd")},
		"too-small-memory": {"; raise the container's memory limit, 204800 bytes", memory(200 << 10)},
	}) {
		id := p.create(shell(name, "true", c.change))
		s := p.status(id)
		expect(t, s.State == created && s.Reason == "" && s.ExitCode == 0, "%s: before its start: %v", name, s)
		wantError(t, p.start(id), c.says)
		p.wantExit(id, 128, "StartError")
		// The code and the reason say of what kind it is.
		message := p.status(id).Message
		expect(t, strings.Contains(message, c.says) && !strings.Contains(message, "precondition"), "%s: message %q", name, message)
		check(t, p.remove(id))
	}
	// Init's output may have bytes of another process, which are no text: only this start fails.
	id := p.create(shell("bytes", "true", mounts))
	init := p.info(id).PID
	harness.Freeze(t, init)
	failed := beside(func() error { return p.start(id) })
	for range 20 { // the start listens to it soon
		check(t, os.WriteFile(fmt.Sprintf("/proc/%d/fd/2", init), []byte("\xff"), 0))
		p.status(id)
	}
	check(t, unix.Kill(init, unix.SIGCONT))
	wantError(t, <-failed, "exec format error")
	p.wantExit(id, 128, "StartError")
	check(t, p.remove(id))
	// It survives the daemon and the shim until someone starts the container, or stops it.
	witness := p.run("witness", forever)
	started, stopped := p.create(shell("started", "", command("/no/such"))), p.create(shell("stopped", "", command("/no/such")))
	p.Kill()
	p.killShim()
	p.Start()
	harness.Eventually(t, "both are created after a restart, too", func() bool { return p.status(started).State == created && p.status(stopped).State == created })
	wantCode(t, p.update(started, &runtimeapi.LinuxContainerResources{CpuShares: 100}), codes.FailedPrecondition)
	wantError(t, p.start(started))
	check(t, p.stop(stopped, 10))
	p.Crash()
	for _, id := range []string{started, stopped} {
		p.wantExit(id, 128, "StartError")
		check(t, p.remove(id))
	}
	harness.Eventually(t, "the other container is there", func() bool { return p.status(witness).State == running })
}

func all(options ...option) option {
	return func(c *runtimeapi.ContainerConfig) {
		for _, each := range options {
			each(c)
		}
	}
}

// Lists and streams have what each container was made from, and of all of them those that a filter leaves.
//
// cri: Container.created_at Container.image_id Container.labels Container.pod_sandbox_id ContainerConfig.labels
// cri: ContainerFilter.label_selector ListContainers StreamContainers StreamContainersResponse.containers Container.metadata
// cri: StreamContainersRequest.filter Container.annotations Container.image Container.image_ref ContainerMetadata.attempt
// cri: ImageSpec.user_specified_image ListContainersRequest.filter Container.id Container.state ContainerFilter.state
// cri: ContainerFilter.pod_sandbox_id ContainerStateValue.state
func TestListFilters(t *testing.T) {
	n := newNode(t)
	a, b := runPod(t, n, "a"), runPod(t, n, "b")
	label := func(c *runtimeapi.ContainerConfig) {
		c.Labels, c.Annotations = map[string]string{"tier": "web", "x": "y"}, map[string]string{"container": "note"}
		c.Image.UserSpecifiedImage = "registry.test/as/written:1"
	}
	first, second, third := a.run("one", forever, label, attempt(3)), a.create(shell("two", "true")), b.run("one", "true", label)
	a.awaitExit(third)
	ids := func(all []*runtimeapi.Container) (ids []string) {
		for _, c := range all {
			ids = append(ids, c.Id)
		}
		return ids
	}
	wantList := func(filter *runtimeapi.ContainerFilter, want ...string) {
		same(t, filter.String(), ids(a.list(filter)), want)
		stream := nodetest.Call(t, n.Runtime.StreamContainers, &runtimeapi.StreamContainersRequest{Filter: filter})
		answer, err := stream.Recv()
		expect(t, err == nil || err == io.EOF && len(want) == 0, "stream: %v", err)
		same(t, "streamed: "+filter.String(), ids(answer.GetContainers()), want)
	}
	wantList(nil, third, second, first)
	wantList(&runtimeapi.ContainerFilter{}, third, second, first)
	wantList(&runtimeapi.ContainerFilter{Id: second}, second)
	wantList(&runtimeapi.ContainerFilter{Id: second[:12]}, second)
	wantList(&runtimeapi.ContainerFilter{PodSandboxId: a.id}, second, first)
	wantList(&runtimeapi.ContainerFilter{State: &runtimeapi.ContainerStateValue{State: exited}}, third)
	wantList(&runtimeapi.ContainerFilter{State: &runtimeapi.ContainerStateValue{State: created}}, second)
	wantList(&runtimeapi.ContainerFilter{LabelSelector: map[string]string{"tier": "web"}}, third, first)
	wantList(&runtimeapi.ContainerFilter{PodSandboxId: b.id, LabelSelector: map[string]string{"tier": "web", "x": "y"}}, third)
	wantList(&runtimeapi.ContainerFilter{Id: "nosuch"})
	wantList(&runtimeapi.ContainerFilter{Id: first, PodSandboxId: b.id})
	l := a.list(&runtimeapi.ContainerFilter{Id: first})[0]
	expect(t, l.State == running && l.PodSandboxId == a.id && l.Labels["tier"] == "web" && l.ImageId != "" && l.CreatedAt != 0 &&
		l.Annotations["container"] == "note" && l.Metadata.Attempt == 3 && l.Image.Image == "registry.test/as/written:1" && l.ImageRef != "", "listed: %v", l)
}

// cri: ReopenContainerLog ReopenContainerLogRequest.container_id UpdateContainerResources UpdateContainerResourcesRequest.container_id
func TestCodes(t *testing.T) {
	p := newPod(t)
	id := p.run("app", forever)
	create := func(p *pod, name string, changes ...option) error {
		return p.createErr(shell(name, "true", changes...))
	}
	for _, c := range []struct {
		err  error
		want codes.Code
	}{
		{p.createErr(nil), codes.InvalidArgument},
		{create(p, ""), codes.InvalidArgument},
		{create(p, "image", func(c *runtimeapi.ContainerConfig) { c.Image.Image = "no.such/image:1" }), codes.NotFound},
		{create(p, "privileged", privileged), codes.InvalidArgument},
		{create(&pod{Node: p.Node, t: t, id: "nosuch"}, "app"), codes.NotFound},
		{p.start("nosuch"), codes.NotFound},
		{p.start(""), codes.InvalidArgument},
		{p.execErr("nosuch", "true"), codes.NotFound},
		{p.execErr(id), codes.InvalidArgument},
		{p.reopen("nosuch"), codes.NotFound},
		{p.update("nosuch", nil), codes.NotFound},
		{p.stop("nosuch", 1), codes.OK},
		{p.remove("nosuch"), codes.OK},
		{p.stopPod(), codes.OK},
		{create(p, "late"), codes.FailedPrecondition},
	} {
		wantCode(t, c.err, c.want)
	}
}

// cri: ContainerConfig.stop_signal ContainerStatus.stop_signal
func TestStopSignal(t *testing.T) {
	p := newPod(t)
	asked := map[int32]runtimeapi.Signal{15: runtimeapi.Signal_SIGNAL_SIGTERM} // else it is that of the image
	for signal, code := range map[runtimeapi.Signal]int32{runtimeapi.Signal_SIGNAL_SIGUSR1: 10, runtimeapi.Signal_SIGNAL_SIGTERM: 15} {
		id := p.run(fmt.Sprint("exits-", code), forever, func(c *runtimeapi.ContainerConfig) { c.StopSignal = asked[code] })
		p.awaitLine(id, "ready")
		same(t, "stop signal", p.status(id).StopSignal.String(), signal.String())
		check(t, p.stop(id, 10))
		p.wantExit(id, code, "Error")
	}
}

// deaf is a script that no signal but SIGKILL ends, with a child of its own.
const deaf = "trap '' TERM USR1; sleep 1000 & echo ready; while true; do sleep 0.02; done"

// heedless is a script that says when it is told to end, and does not.
const heedless = "trap 'echo told' TERM USR1; echo ready; while true; do sleep 0.02; done"

// cri: StopContainer StopContainerRequest.timeout
func TestStopKillsAfterTheGrace(t *testing.T) {
	p := newPod(t)
	for seconds, name := range []string{"at-once", "after-a-second"} {
		id := p.run(name, deaf)
		p.awaitLine(id, "ready")
		began := time.Now()
		check(t, p.stop(id, int64(seconds)))
		took, grace := time.Since(began), time.Duration(seconds)*time.Second
		expect(t, took >= grace, "%s: stopped after %v", name, took)
		p.wantExit(id, 137, "Error")
		harness.Eventually(t, "no process is left", func() bool { return len(p.inCgroup(p.info(id).CgroupsPath)) == 0 })
	}
}

// A log is reopened meanwhile, without waiting for the stop.
//
// cri: ContainerStatus.log_path
func TestP40_ShorterGraceWins(t *testing.T) {
	p := newPod(t)
	id := p.run("app", heedless)
	p.awaitLine(id, "ready")
	first := beside(func() error { return p.stop(id, 3600) })
	p.awaitLine(id, "told")
	path := p.status(id).LogPath
	check(t, os.Rename(path, path+".old"))
	check(t, p.reopen(id))
	_, err := os.Stat(path)
	check(t, err)
	check(t, p.stop(id, 0))
	check(t, <-first)
	p.wantExit(id, 137, "Error")
}

type eventStream = runtimeapi.RuntimeService_GetContainerEventsClient

// listen subscribes to the node's events. It returns when they are sure to
// come: there is no answer to a subscription, so it makes events until one does.
func (p *pod) listen() eventStream {
	ctx, cancel := context.WithCancel(context.Background())
	p.t.Cleanup(cancel)
	stream, err := p.Runtime.GetContainerEvents(ctx, &runtimeapi.GetEventsRequest{})
	check(p.t, err)
	arrived := beside(func() error { _, err := stream.Recv(); return err })
	for {
		check(p.t, p.remove(p.create(shell("marker", "true"))))
		select {
		case err := <-arrived:
			check(p.t, err)
			return stream
		default:
		}
	}
}

// events reads the events of the containers with these names, or of pods, up to the one that is last, each as "name
// what: state of the pod, states of its containers".
func (p *pod) events(stream eventStream, last string) (all []string) {
	names, latest := map[string]string{p.id: "pod"}, int64(0)
	for len(all) == 0 || !strings.HasPrefix(all[len(all)-1], last) {
		event, err := stream.Recv()
		check(p.t, err)
		expect(p.t, event.CreatedAt > latest, "an event of %d comes after one of %d", event.CreatedAt, latest)
		latest = event.CreatedAt
		var states []string
		for _, c := range event.ContainersStatuses {
			names[c.Id] = c.Metadata.Name
			states = append(states, fmt.Sprintf("%s %v", c.Metadata.Name, strings.TrimPrefix(c.State.String(), "CONTAINER_")))
		}
		slices.Sort(states)
		kind := strings.TrimSuffix(strings.TrimPrefix(event.ContainerEventType.String(), "CONTAINER_"), "_EVENT")
		state := strings.TrimPrefix(event.PodSandboxStatus.GetState().String(), "SANDBOX_")
		if name := names[event.ContainerId]; name != "" && name != "marker" {
			all = append(all, fmt.Sprintf("%s %s: %s %s", name, kind, state, strings.Join(states, ", ")))
		}
	}
	return all
}

func TestEventsOfAPodsLife(t *testing.T) {
	p := newPod(t)
	stream := p.listen()
	one := p.run("one", forever)
	bad := p.create(shell("two", "", command("/no/such")))
	wantError(t, p.start(bad))
	check(t, p.remove(bad))
	check(t, p.stop(one, 10))
	check(t, p.remove(one))
	three := p.run("three", forever)
	check(t, unix.Kill(p.info(three).PID, unix.SIGKILL))
	p.wantExit(three, 137, "Error")
	p.RemovePod(p.id)
	same(t, "events", "\n"+strings.Join(p.events(stream, "pod DELETED"), "\n"), `
one CREATED: READY one CREATED
one STARTED: READY one RUNNING
two CREATED: READY one RUNNING, two CREATED
two STOPPED: READY one RUNNING, two EXITED
two DELETED: READY one RUNNING
one STOPPED: READY one EXITED
one DELETED: READY `+`
three CREATED: READY three CREATED
three STARTED: READY three RUNNING
three STOPPED: READY three EXITED
pod STOPPED: NOTREADY three EXITED
three DELETED: NOTREADY `+`
pod DELETED: NOTREADY `)
}

// A consumer that does not read holds up neither containers nor other consumers. It gets all of it later, in the
// same order; or, when it is too far behind, what was kept for it and an error that says so (package event).
//
// cri: ContainerEventResponse.container_event_type ContainerEventResponse.container_id ContainerEventResponse.containers_statuses
// cri: ContainerEventResponse.created_at ContainerEventResponse.pod_sandbox_status ContainerMetadata.attempt ContainerStatus.id
// cri: ContainerStatus.metadata GetContainerEvents
func TestP32_ConsumerThatDoesNotRead(t *testing.T) {
	p := newPod(t)
	lazy, busy := p.listen(), p.listen()
	const rounds = 50
	for i := range uint32(rounds) {
		check(t, p.remove(p.create(shell("round", "true", attempt(i)))))
	}
	last := p.run("last", "true")
	p.wantExit(last, 0, "Completed")
	read := p.events(busy, "last STOPPED")
	expect(t, len(read) >= 3*rounds, "%d events of %d rounds: %v", len(read), rounds, read)
	same(t, "what the lazy one reads", strings.Join(p.events(lazy, "last STOPPED"), "\n"), strings.Join(read, "\n"))
	p.Stop()
	_, err := busy.Recv()
	expect(t, err != nil && err != io.EOF, "the stream of a daemon that has ended gave %v", err)
	p.Start()
}

// A start that fails for a reason of the node leaves no process of the container, and one in a pod that has
// ended is refused.
func TestStartThatTheNodeFails(t *testing.T) {
	p := newPod(t)
	id := p.create(shell("unrecorded", forever))
	init := p.info(id).PID
	// The supervisor cannot write its record.
	check(t, os.Mkdir(harness.Glob(t, p.State, "shims", "*", "records", id+".json")[0]+".new", 0o700))
	wantError(t, p.start(id), "is a directory")
	p.wantExit(id, 128, "StartError")
	harness.Eventually(t, "its init has ended", func() bool { return errors.Is(unix.Kill(init, 0), unix.ESRCH) })
	check(t, p.remove(id))
	late := p.create(shell("late", forever))
	check(t, unix.Kill(p.pausePID(), unix.SIGKILL))
	request := &runtimeapi.PodSandboxStatusRequest{PodSandboxId: p.id}
	harness.Eventually(t, "the pod is not ready", func() bool {
		return nodetest.Call(t, p.Runtime.PodSandboxStatus, request).Status.State == runtimeapi.PodSandboxState_SANDBOX_NOTREADY
	})
	wantCode(t, p.start(late), codes.FailedPrecondition)
	check(t, p.removePod())
}
