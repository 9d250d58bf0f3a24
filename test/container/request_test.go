package container

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// A container is made with the config of its own pod. The kubelet makes that
// config anew for each container, so that only what identifies the pod counts.
//
// cri: PodSandboxMetadata.namespace PodSandboxMetadata.uid
func TestConfigOfAnotherPod(t *testing.T) {
	p := newPod(t)
	config := shell("app", forever)
	create := func(change func(*runtimeapi.PodSandboxConfig)) (string, error) {
		asked := proto.CloneOf(p.config)
		change(asked)
		answer, err := p.Runtime.CreateContainer(limited(t), &runtimeapi.CreateContainerRequest{PodSandboxId: p.id, Config: config, SandboxConfig: asked})
		return answer.GetContainerId(), err
	}
	for field, change := range map[string]func(*runtimeapi.PodSandboxMetadata){
		"uid":       func(m *runtimeapi.PodSandboxMetadata) { m.Uid = "another" },
		"name":      func(m *runtimeapi.PodSandboxMetadata) { m.Name = "another" },
		"namespace": func(m *runtimeapi.PodSandboxMetadata) { m.Namespace = "another" },
	} {
		_, err := create(func(c *runtimeapi.PodSandboxConfig) { change(c.Metadata) })
		wantRefused(t, err, "sandbox_config.metadata."+field+":")
	}
	if left := p.list(nil); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	id, err := create(func(c *runtimeapi.PodSandboxConfig) {
		c.Metadata.Attempt, c.Annotations = 7, map[string]string{"of": "today"}
	})
	check(t, err)
	check(t, p.remove(id))
}

// The time-outs of the CRI are any int64: more seconds than a Duration holds
// are a long time, and no short one.
//
// cri: ExecSyncResponse.stdout
func TestTimeoutsBeyondADuration(t *testing.T) {
	p := newPod(t)
	for _, seconds := range []int64{1e10, math.MaxInt64} {
		id := p.run("app", forever)
		p.awaitLine(id, "ready")
		answer, err := p.tryExec(id, seconds, "/bin/sh", "-c", "sleep 0.3; echo done")
		check(t, err)
		same(t, "exec", string(answer.Stdout), "done\n")
		check(t, p.stop(id, seconds))
		p.wantExit(id, 10, "Error") // of its trap: it had the time to end by itself
		check(t, p.remove(id))
	}
	id := p.run("app", forever)
	check(t, p.stop(id, math.MinInt64))
	p.wantExit(id, 137, "Error")
}

// created_at grows whatever the clock does, also over a restart: the kubelet
// takes the newest container of a name for the one that counts.
//
// cri: ContainerStatus.created_at
func TestCreatedAtAfterTheClockWasSetBack(t *testing.T) {
	p := newPod(t)
	old := p.run("app", "exit 1")
	p.wantExit(old, 1, "Error")
	p.Kill()
	ahead := time.Now().Add(24 * time.Hour).UnixNano()
	record := filepath.Join(p.Root, "containers", old+".json")
	data, err := os.ReadFile(record)
	check(t, err)
	later := regexp.MustCompile(`"created_at": ?\d+`).ReplaceAll(data, fmt.Appendf(nil, `"created_at": %d`, ahead))
	check(t, os.WriteFile(record, later, 0o600))
	p.Start()
	last := p.status(old).CreatedAt
	if last != ahead {
		t.Fatalf("created at %d, the record says %d", last, ahead)
	}
	for i := range 3 {
		id := p.create(shell("app", "true", attempt(uint32(i+1))))
		now := p.status(id).CreatedAt
		if now <= last {
			t.Errorf("attempt %d is created at %d, the one before at %d", i+1, now, last)
		}
		last = now
	}
}

// What is meant for Windows would have no effect, and is refused by its name.
//
// cri: ContainerConfig.windows PodSandboxConfig.windows UpdateContainerResourcesRequest.windows
func TestFieldsOfWindows(t *testing.T) {
	p := newPod(t)
	id := p.run("app", forever, memory(64<<20))
	sandbox := proto.CloneOf(p.config)
	sandbox.Windows = &runtimeapi.WindowsPodSandboxConfig{}
	_, err := p.Runtime.UpdateContainerResources(limited(t), &runtimeapi.UpdateContainerResourcesRequest{
		ContainerId: id, Linux: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 128 << 20}, Windows: &runtimeapi.WindowsContainerResources{},
	})
	wantRefused(t, err, "windows")
	if limit := p.status(id).Resources.GetLinux().GetMemoryLimitInBytes(); limit != 64<<20 {
		t.Errorf("a refused update has set %d", limit)
	}
	_, err = p.Runtime.CreateContainer(limited(t), &runtimeapi.CreateContainerRequest{PodSandboxId: p.id, Config: shell("windows", forever), SandboxConfig: sandbox})
	wantRefused(t, err, "sandbox_config.windows")
	_, err = p.Image.PullImage(limited(t), &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: harness.BusyboxImage}, SandboxConfig: sandbox})
	wantRefused(t, err, "sandbox_config.windows:")
	_, err = p.tryCreate(shell("windows", forever, func(c *runtimeapi.ContainerConfig) { c.Windows = &runtimeapi.WindowsContainerConfig{} }))
	wantRefused(t, err, "config.windows")
	_, err = p.Runtime.RunPodSandbox(limited(t), &runtimeapi.RunPodSandboxRequest{Config: sandbox})
	wantRefused(t, err, "config.windows:")
}

// What can be seen to be wrong before anything is made is refused by its name: an
// image for a runtime handler that there is not, a limit of memory and swap
// together without one of memory, a word that no program can get, an environment
// that no program can be executed with. The largest one that is none is passed on.
//
// cri: ImageSpec.runtime_handler LinuxContainerResources.memory_swap_limit_in_bytes ExecSyncRequest.cmd
func TestRefusedBeforeAnythingIsMade(t *testing.T) {
	p := newPod(t)
	before := p.Look()
	many := func(count, size int) option {
		return func(c *runtimeapi.ContainerConfig) {
			for i := range count {
				env(fmt.Sprint("A", i), strings.Repeat("x", size))(c)
			}
		}
	}
	for _, c := range []struct {
		names  string
		change option
	}{
		{"config.image.runtime_handler", func(c *runtimeapi.ContainerConfig) { c.Image.RuntimeHandler = "no-such" }},
		{"config.mounts[0].image.runtime_handler", imageMount("/data", func(m *runtimeapi.Mount) { m.Image.RuntimeHandler = "no-such" })},
		{"config.linux.resources.memory_swap_limit_in_bytes", func(c *runtimeapi.ContainerConfig) { c.Linux.Resources.MemorySwapLimitInBytes = 100 << 20 }},
		{"LARGE", env("LARGE", strings.Repeat("x", 128<<10))},
		{"", many(64, 100<<10)},
		{"", func(c *runtimeapi.ContainerConfig) {
			c.Args = slices.Repeat([]string{strings.Repeat("x", 100<<10)}, 100)
		}},
	} {
		_, err := p.tryCreate(shell("app", forever, noLog, c.change))
		wantRefused(t, err, c.names)
		if len(fmt.Sprint(err)) > 1000 {
			t.Errorf("an error of %d bytes", len(fmt.Sprint(err)))
		}
	}
	for _, left := range p.Differences(before) {
		t.Error(left)
	}
	id := p.run("app", "echo ${#LARGE}; "+forever, many(10, 100<<10), env("LARGE", strings.Repeat("x", 128<<10-100)))
	p.awaitLine(id, "130972")
	if got := p.info(id).RuntimeSpec.Process.Args; len(got) != 3 {
		t.Errorf("arguments in the verbose status: %q", got)
	}
	_, err := p.tryExec(id, 0, "echo", "a\x00b")
	wantCode(t, err, codes.InvalidArgument)
	_, err = p.Runtime.Exec(limited(t), &runtimeapi.ExecRequest{ContainerId: id, Cmd: []string{"echo", "a\x00b"}, Stdout: true})
	wantCode(t, err, codes.InvalidArgument)
}
