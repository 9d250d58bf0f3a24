package container

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

// What a container has started ends with it, also where its pid namespace goes on: the pod's, the node's, that of
// another container. It would keep ports and locks from the container that comes next.
func TestNothingOutlivesTheContainer(t *testing.T) {
	n := newNode(t)
	hierarchies, err := cgroup.FindHierarchies()
	check(t, err)
	for mode, of := range map[runtimeapi.NamespaceMode]runtimeapi.NamespaceMode{ // of the container, and of its pod
		runtimeapi.NamespaceMode_POD: runtimeapi.NamespaceMode_POD, runtimeapi.NamespaceMode_NODE: runtimeapi.NamespaceMode_NODE,
		runtimeapi.NamespaceMode_TARGET: runtimeapi.NamespaceMode_CONTAINER,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			p := runPod(t, n, strings.ToLower(mode.String()), podPID(of))
			first, target := p.run("target", forever), ""
			if mode == runtimeapi.NamespaceMode_TARGET {
				target = first
			}
			leaves := func(number uint32, script string) string {
				id := p.run("app", "(trap '' TERM; exec sleep 7777) & echo begun; "+script, attempt(number), pidMode(mode, target))
				p.awaitLine(id, "begun")
				return id
			}
			wantEmpty := func(what, path string) {
				harness.Eventually(t, what+": nothing runs any more", func() bool { return len(p.inCgroup(path)) == 0 })
				// Or the kubelet's cAdvisor would go on to list the container.
				harness.Eventually(t, what+": the cgroup is removed", func() bool { return !hierarchies.Exists(path) })
			}
			exits := leaves(0, "exit 1")
			p.wantExit(exits, 1, "Error")
			wantEmpty("after its end", p.info(exits).CgroupsPath)
			stopped := leaves(1, forever)
			p.awaitLine(stopped, "ready")
			check(t, p.stop(stopped, 30))
			p.wantExit(stopped, 10, "Error")
			wantEmpty("after its stop", p.info(stopped).CgroupsPath)
			adopted := leaves(2, "until test -e /enough; do sleep 0.02; done; exit 3")
			p.killShim()
			p.awaitExecs(adopted)
			p.letEnd(adopted)
			p.awaitExit(adopted)
			wantEmpty("after the end of an adopted one", p.info(adopted).CgroupsPath)
			same(t, "the first one", p.exec(first, "echo here"), "here")
			n.RemovePod(p.id)
		})
	}
}

// A log that the next shim cannot open is opened when the kubelet asks for it.
func TestLogThatIsOpenedLate(t *testing.T) {
	p := newPod(t)
	id := p.run("app", "echo first; until test -e /enough; do sleep 0.02; done; echo last; "+forever)
	p.awaitLine(id, "first")
	path := p.status(id).LogPath
	check(t, os.Rename(path, path+".old"))
	check(t, os.Mkdir(path, 0o700))
	p.killShim()
	p.awaitExecs(id)
	wantError(t, p.reopen(id))
	check(t, os.Remove(path))
	check(t, p.reopen(id))
	p.exec(id, "touch /enough")
	p.awaitLine(id, "last")
}

func TestOOMKilledIsWhatItSays(t *testing.T) {
	p := newPod(t, nodetest.PodOption(podPID(runtimeapi.NamespaceMode_CONTAINER)))
	const eats = "sh -c 'tail /dev/zero'"
	p.wantExit(p.run("wrapper", eats+"; code=$?; sleep 0.3; exit $code", memory(16<<20)), 137, "OOMKilled")
	// Its child is killed for memory, and it continues.
	id := p.run("goes-on", eats+"; echo went on; sleep 1000000", memory(16<<20))
	p.awaitLine(id, "went on")
	check(t, p.stop(id, 0))
	p.wantExit(id, 137, "Error")
	killed := p.run("killed", "sleep 1000000", memory(16<<20))
	check(t, unix.Kill(p.info(killed).PID, unix.SIGKILL))
	p.wantExit(killed, 137, "Error")
	p.wantExit(p.run("self", "exit 137", memory(16<<20)), 137, "Error")
}

// cri: ContainerConfig.log_path
func TestP59_NothingRunsAfterRemove(t *testing.T) {
	p := newPod(t)
	for _, script := range []string{deaf, forever, "(while true; do (sleep 1000 &) ; sleep 0.001; done) & sleep 1000"} {
		id := p.run("app", script, noLog)
		cgroup := p.info(id).CgroupsPath
		harness.Eventually(t, "it has a child", func() bool { return len(p.pidsInCgroup(cgroup)) > 1 })
		check(t, p.remove(id))
		same(t, fmt.Sprintf("%q: left", script), p.inCgroup(cgroup), nil)
	}
	check(t, p.remove(p.create(shell("app", "true"))))
	same(t, "shims", len(p.Node.Supervisors()), 1)
	p.RemovePod(p.id)
}

// cri: RemovePodSandboxRequest.pod_sandbox_id
func TestPodStopsItsContainers(t *testing.T) {
	p := newPod(t)
	ids := []string{p.run("deaf", deaf), p.run("app", forever), p.create(shell("waits", "true")), p.run("ended", "true")}
	check(t, p.stopPod())
	for _, id := range ids {
		s := p.status(id)
		expect(t, s.State == exited && s.FinishedAt != 0, "in a pod that was stopped: %v", s)
		same(t, "left", p.inCgroup(p.info(id).CgroupsPath), nil)
	}
	check(t, p.removePod())
	same(t, "left", p.list(nil), nil)
}

// A daemon that is stopped does not wait for what its clients can ask of the next one: the grace of a container
// that ignores its signal, a command that runs on. The calls are answered, and nothing happens to the container.
//
// cri: ExecSyncResponse.exit_code
func TestShutdownCancelsWaits(t *testing.T) {
	n := newNode(t, nodetest.Config("[limits]\nshutdown = '1h'\ncreate = '1h'"))
	p := runPod(t, n, "web")
	id := p.run("app", deaf)
	p.awaitLine(id, "ready")
	pid := p.info(id).PID
	stopped := beside(func() error { return p.stop(id, 1000) })
	ran := beside(func() error { return p.execErr(id, "tail", "-f", "/dev/null") })
	harness.Eventually(t, "the command runs", func() bool { return slices.Contains(p.tree(id), "tail") })
	n.Stop() // with its calls it would take the hour of its limit
	wantCode(t, <-stopped, codes.Unavailable)
	wantCode(t, <-ran, codes.Unavailable)
	n.Start()
	now := p.status(id)
	expect(t, now.State == running && p.info(id).PID == pid, "the container is %v", now)
	harness.Eventually(t, "nothing is left of the command", func() bool { return !slices.Contains(p.tree(id), "tail") })
	check(t, p.stop(id, 0))
	p.wantExit(id, 137, "Error")
}

// A container that is being made is undone, with all that makes it, when its caller leaves, and when the daemon is
// stopped: then the caller is told to ask the next one.
//
// cri: CreateContainerRequest.config
func TestEndDuringCreate(t *testing.T) {
	p := runPod(t, newNode(t, nodetest.Config("[limits]\ncreate = '1h'")), "web")
	hangs := hooked(t, nodetest.Hook{Kind: "createRuntime", Script: "exec sleep 7774", Seconds: 7774})
	hookRuns := func() bool { return len(processesWithArgument(t, "7774")) > 0 }
	ctx, leave := context.WithCancel(harness.Limited(t))
	go p.Runtime.CreateContainer(ctx, &runtimeapi.CreateContainerRequest{PodSandboxId: p.id, Config: shell("app", forever, hangs), SandboxConfig: p.config})
	harness.Eventually(t, "the hook runs", hookRuns)
	leave()
	harness.Eventually(t, "the hook has ended", func() bool { return !hookRuns() })
	answer := beside(func() error { return p.createErr(shell("other", forever, hangs)) })
	harness.Eventually(t, "the hook runs", hookRuns)
	p.Stop()
	wantCode(t, <-answer, codes.Unavailable, "shutting down")
	p.Start()
	same(t, "left", p.list(nil), nil)
}

// After a reboot containers are listed as they ended, with code, reason, times and log, over any number of starts
// of the daemon, until they are removed; those that ran have ended with the machine.
func TestContainersAfterAReboot(t *testing.T) {
	p := newPod(t)
	ended := p.run("ended", "echo said; exit 3")
	p.wantExit(ended, 3, "Error")
	lives := p.run("lives", "echo began; "+forever)
	p.awaitLine(lives, "ready")
	was, created := p.status(ended), p.status(lives).CreatedAt
	p.Reboot()
	for range 3 {
		p.Start()
		same(t, "status of the container that had ended", p.status(ended), was)
		now := p.status(lives)
		expect(t, now.State == exited && now.FinishedAt >= now.StartedAt && now.Reason != "", "the container that ran is %v", now)
		same(t, "when it was created", now.CreatedAt, created)
		same(t, "log of the container that had ended", p.stdout(ended), "said\n")
		same(t, "log of the container that ran", p.stdout(lives), "began\nready\n")
		same(t, "containers listed", len(p.list(nil)), 2)
		p.Kill()
	}
	p.Start()
	check(t, p.remove(ended))
	check(t, p.remove(lives))
}

// A layer that no container explains is removed when the daemon starts; those of
// containers stay, and minicri check has nothing to say of them.
func TestSnapshotsWithoutContainer(t *testing.T) {
	p := newPod(t)
	id := p.run("app", "echo kept > /kept; "+forever)
	p.Stop()
	store, err := image.Open(t.Context(), image.Config{Root: p.Root, Logger: slog.New(slog.DiscardHandler)})
	check(t, err)
	orphan := strings.Repeat("ab", 32)
	for _, key := range []string{orphan, orphan + "-image-0"} {
		check(t, store.Prepare(t.Context(), key, nodetest.BusyboxImage, image.PrepareOptions{}))
	}
	check(t, store.Close())
	p.Start()
	harness.Eventually(t, "the layers are removed", func() bool { return strings.Count(p.Log(), "name="+orphan) == 2 })
	same(t, "snapshots without a container", nodetest.Info[[]string](t, p.Node, "orphanSnapshots"), nil)
	output, err := p.RunCommand("check")
	expect(t, err == nil && !strings.Contains(output, "snapshot"), "check: %v\n%s", err, output)
	same(t, "the file of the container", p.exec(id, "cat /kept"), "kept")
}
