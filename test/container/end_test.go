package container

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// What a container has started ends with it, also where its pid namespace goes
// on: the pod's, the node's, that of another container. It would keep ports and
// locks from the container that comes next.
func TestNothingOutlivesTheContainer(t *testing.T) {
	n := newNode(t)
	for name, mode := range map[string]runtimeapi.NamespaceMode{"pod": runtimeapi.NamespaceMode_POD, "node": runtimeapi.NamespaceMode_NODE, "target": runtimeapi.NamespaceMode_TARGET} {
		t.Run(name, func(t *testing.T) {
			of := mode
			if mode == runtimeapi.NamespaceMode_TARGET {
				of = runtimeapi.NamespaceMode_CONTAINER
			}
			p := runPod(t, n, name, podPID(of))
			first, target := p.run("target", forever), ""
			if mode == runtimeapi.NamespaceMode_TARGET {
				target = first
			}
			leaves := func(number uint32, script string) string {
				id := p.run("app", "(trap '' TERM; exec sleep 7777) & echo begun; "+script, attempt(number), pidMode(mode, target))
				p.awaitLine(id, "begun")
				return id
			}
			wantEmpty := func(what, cgroup string) {
				t.Helper()
				eventually(t, what+": nothing runs any more", func() bool { return len(p.inCgroup(cgroup)) == 0 })
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
			p.replaceShims(adopted)
			_, _ = p.tryExec(adopted, 0, "touch", "/enough") // the end that it brings about may take it along
			p.awaitExit(adopted)
			wantEmpty("after the end of an adopted one", p.info(adopted).CgroupsPath)
			same(t, "the first one", p.exec(first, "echo here"), "here")
			n.RemovePod(p.id)
		})
	}
}

// replaceShims kills whatever supervises containers on the node, and returns
// when the container, which runs, is adopted.
func (p *pod) replaceShims(id string) {
	p.t.Helper()
	before := shims(p.Node)
	for _, pid := range before {
		check(p.t, unix.Kill(pid, unix.SIGKILL))
	}
	eventually(p.t, "the container is adopted", func() bool {
		gone := !slices.ContainsFunc(shims(p.Node), func(pid int) bool { return slices.Contains(before, pid) })
		if !gone || p.status(id).State != running {
			return false
		}
		_, err := p.tryExec(id, 0, "/bin/true")
		return err == nil
	})
}

// A log on a disk that hangs hides neither the end of its container nor its
// exit code, and keeps no one from stopping and removing it.
//
// attack: what a container can stop: by a disk that hangs under its log
// held: its own log; its end is seen, and it is stopped and removed
func TestEndOnALogDiskThatHangs(t *testing.T) {
	n := newNode(t)
	d := newDisk(t)
	p := runPod(t, n, "web", func(c *runtimeapi.PodSandboxConfig) { c.LogDirectory = filepath.Join(d.dir, "logs") })
	other := runPod(t, n, "other")
	witness := other.run("witness", forever)
	ends := p.run("ends", "until test -e /enough; do sleep 0.02; done; echo last words; exit 7")
	stops := p.run("stops", "until test -e /enough; do sleep 0.02; done; while true; do echo more; sleep 0.02; done")
	cgroup := p.info(stops).CgroupsPath
	thaw := d.freeze()
	p.exec(stops, "touch /enough")
	// It takes the command with it that tells it to end, if that has not ended yet.
	_, _ = p.tryExec(ends, 0, "touch", "/enough")
	p.wantExit(ends, 7, "Error")
	check(t, p.inTime(30*time.Second, func() error { return p.stop(ends, 1) }))
	check(t, p.inTime(30*time.Second, func() error { return p.stop(stops, 0) }))
	p.wantExit(stops, 137, "Error")
	if left := p.inCgroup(cgroup); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	same(t, "a container of another pod", other.exec(witness, "echo here"), "here")
	thaw()
	eventually(t, "the last words are in the log", func() bool {
		stdout, _ := p.logs(ends)
		return strings.HasSuffix(stdout, "last words\n")
	})
	for _, id := range []string{ends, stops} {
		check(t, p.remove(id))
	}
	n.RemovePod(p.id) // before its logs go
}

// A log that the next shim cannot open is opened when the kubelet asks for it.
func TestLogThatIsOpenedLate(t *testing.T) {
	p := newPod(t)
	id := p.run("app", "echo first; until test -e /enough; do sleep 0.02; done; echo last; "+forever)
	p.awaitLine(id, "first")
	path := p.status(id).LogPath
	check(t, os.Rename(path, path+".old"))
	check(t, os.Mkdir(path, 0o700))
	p.replaceShims(id)
	if err := p.reopen(id); err == nil {
		t.Error("a directory was opened as a log")
	}
	check(t, os.Remove(path))
	check(t, p.reopen(id))
	p.exec(id, "touch /enough")
	p.awaitLine(id, "last")
}

func TestOOMKilledIsWhatItSays(t *testing.T) {
	p := newPod(t, harness.PodOption(podPID(runtimeapi.NamespaceMode_CONTAINER)))
	const eats = "sh -c 'tail /dev/zero'"
	wrapper := p.run("wrapper", eats+"; code=$?; sleep 0.3; exit $code", memory(16<<20))
	p.wantExit(wrapper, 137, "OOMKilled")
	// Its child is killed for memory, and it continues.
	id := p.run("goes-on", eats+"; echo went on; sleep 1000000", memory(16<<20))
	p.awaitLine(id, "went on")
	check(t, p.stop(id, 0))
	p.wantExit(id, 137, "Error")
	killed := p.run("killed", "sleep 1000000", memory(16<<20))
	check(t, unix.Kill(p.info(killed).PID, unix.SIGKILL))
	p.wantExit(killed, 137, "Error")
	self := p.run("self", "exit 137", memory(16<<20))
	p.wantExit(self, 137, "Error")
}
