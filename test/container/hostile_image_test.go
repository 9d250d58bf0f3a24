package container

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

const hostileImage = "test.example/hostile:1"

func importHostile(n *harness.Node) {
	n.BuildImage(hostileImage, harness.Object{
		"Cmd": []string{"/bin/sh"}, "Env": []string{"PATH=/bin"}, "Volumes": harness.Object{"/data": harness.Object{}, "/absent": harness.Object{}},
	}, n.AddBusybox, func(l *harness.Layer) {
		l.Dir("data", 0o777, 0)
		l.File("data/suid", 0o4755, 0, "#!/bin/sh\n")
		l.Device("data/null", 1, 3)
		l.File("suid", 0o4755, 0, "#!/bin/sh\n")
	})
}

// No user of the node reaches what an image brings: neither the files of a
// running container nor its volumes, on whose filesystem no device nodes are made.
func TestNothingOfAnImageActsOnTheNode(t *testing.T) {
	n := newNode(t)
	importHostile(n)
	mapping := []*runtimeapi.IDMapping{{ContainerId: 0, HostId: 300000, Length: 65536}}
	users := &runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_POD, Uids: mapping, Gids: mapping}
	for name, userns := range map[string]*runtimeapi.UserNamespace{"node": nil, "own": users} {
		p := runPod(t, n, name, func(c *runtimeapi.PodSandboxConfig) { c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = userns })
		id := p.run("app", forever, func(c *runtimeapi.ContainerConfig) {
			c.Image.Image = hostileImage
			c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = userns
		})
		same(t, "the container's own view", strings.Join(strings.Fields(p.exec(id, "test -u /suid && echo > /absent/new && stat -c %u:%a /data /absent && ls /data")), " "), "0:777 0:755 suid")
		for _, path := range []string{
			filepath.Join(n.State, "containers", id, "rootfs", "suid"),
			filepath.Join(n.State, "containers", id, "config.json"),
			filepath.Join(n.Root, "container-volumes", id, "1", "suid"),
		} {
			_, err := os.Lstat(path)
			check(t, err) // else it would prove nothing
			look := exec.Command("stat", path)
			look.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
			if out, err := look.CombinedOutput(); err == nil {
				t.Errorf("user namespace %s: any user reaches %s: %s", name, path, out)
			}
		}
		_, err := os.Lstat(filepath.Join(n.Root, "container-volumes", id, "1", "null"))
		if !errors.Is(err, os.ErrNotExist) {
			t.Errorf("a device of the image is on the node: %v", err)
		}
		n.RemovePod(p.id)
	}
}

// What a container writes to the volumes of its image counts as its writable
// layer, by which the kubelet evicts.
func TestVolumesOfTheImageCount(t *testing.T) {
	const size = 8 << 20
	n := newNode(t)
	importHostile(n)
	p := runPod(t, n, "web")
	id := p.run("app", "head -c 8388608 /dev/zero > /data/large; echo written; "+forever, func(c *runtimeapi.ContainerConfig) { c.Image.Image = hostileImage })
	p.awaitLine(id, "written")
	eventually(t, "it counts", func() bool {
		stats, err := p.Runtime.ContainerStats(limited(t), &runtimeapi.ContainerStatsRequest{ContainerId: id})
		check(t, err)
		all, err := p.Image.ImageFsInfo(limited(t), &runtimeapi.ImageFsInfoRequest{})
		check(t, err)
		return stats.Stats.WritableLayer.GetUsedBytes().GetValue() >= size && all.ContainerFilesystems[0].GetUsedBytes().GetValue() >= size
	})
}

// An environment that no program can be executed with is refused before
// anything is written; the largest one that is none is passed on.
func TestEnvironmentBeyondWhatExecTakes(t *testing.T) {
	p := newPod(t)
	before := p.Look()
	variable := func(size int) option {
		return func(c *runtimeapi.ContainerConfig) {
			c.LogPath = ""
			c.Envs = append(c.Envs, &runtimeapi.KeyValue{Key: "LARGE", Value: []byte(strings.Repeat("x", size))})
		}
	}
	_, err := p.tryCreate(shell("app", "true", variable(128<<10)))
	wantCode(t, err, codes.InvalidArgument)
	if err == nil || !strings.Contains(err.Error(), "LARGE") || len(err.Error()) > 1000 {
		t.Errorf("the error does not name the variable: %.1000v", err)
	}
	_, err = p.tryCreate(shell("app", "true", func(c *runtimeapi.ContainerConfig) {
		c.LogPath = ""
		for range 100 {
			c.Args = append(c.Args, strings.Repeat("x", 100<<10))
		}
	}))
	wantCode(t, err, codes.InvalidArgument)
	for _, left := range p.Differences(before) {
		t.Error(left)
	}
	const largest = 128<<10 - 100
	id := p.run("app", "echo ${#LARGE}; exit 1", variable(largest), func(c *runtimeapi.ContainerConfig) { c.LogPath = "app.log" })
	p.wantExit(id, 1, "Error")
	p.awaitLine(id, "130972")
	if got := p.info(id).RuntimeSpec.Process.Args; len(got) != 3 {
		t.Errorf("arguments in the verbose status: %q", got)
	}
}
