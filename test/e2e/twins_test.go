package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// twin is a node in namespaces of its own, as one that is a container: its paths
// are those of every other twin, its files are not, and its pods are in the same
// cgroups of the same machine.
type twin struct {
	t      *testing.T
	real   string // the directory that the node sees at shared
	shared string
	flags  []string

	holder *exec.Cmd // unshare(1); its child is process 1 of the node
	init   int
	daemon *exec.Cmd // nsenter(1), whose child is the daemon
	hangUp func()
	cri    runtimeapi.RuntimeServiceClient
}

// newTwins makes two nodes with the same paths, below one cgroup parent.
func newTwins(t *testing.T) (a, b *twin) {
	t.Helper()
	n := newNode(t)                       // for its cgroups, and for the look at what is left
	shared, err := os.MkdirTemp("", "tw") // short: the state directory's path is bounded
	check(t, err)
	t.Cleanup(func() { check(t, os.RemoveAll(shared)) })
	var twins []*twin
	for i := range 2 {
		w := &twin{t: t, real: filepath.Join(n.Dir, fmt.Sprint("twin-", i)), shared: shared, hangUp: func() {}}
		for _, dir := range []string{"r", "s", "n", "net.d", "logs"} {
			check(t, os.MkdirAll(filepath.Join(w.real, dir), 0o755))
		}
		network := fmt.Sprintf(`{"cniVersion": "1.1.0", "name": %q, "plugins": [{"type": "bridge", "bridge": "twin", "ipam": {"type": "host-local", "dataDir": %q, "ranges": [[{"subnet": "10.88.0.0/16"}]]}}]}`,
			filepath.Base(n.Dir)+strconv.Itoa(i), shared+"/addresses")
		check(t, os.WriteFile(filepath.Join(w.real, "net.d", "10.conflist"), []byte(network), 0o644))
		toml := fmt.Sprintf("cgroup_driver = %q\ncgroup_parent = %q\n%s", harness.CgroupDriver(), n.CgroupParent, fast)
		check(t, os.WriteFile(filepath.Join(w.real, "config.toml"), []byte(toml), 0o644))
		w.flags = []string{
			filepath.Join(filepath.Dir(n.CNIBin), "minicri"),
			"--config", shared + "/config.toml", "--socket", shared + "/sock", "--root", shared + "/r", "--state", shared + "/s",
			"--netns-dir", shared + "/n", "--cni-conf-dir", shared + "/net.d", "--cni-bin-dir", n.CNIBin,
			"--shim", filepath.Join(filepath.Dir(n.CNIBin), "minicri-shim"),
		}
		t.Cleanup(w.end)
		w.boot()
		w.start()
		twins = append(twins, w)
	}
	return twins[0], twins[1]
}

// boot makes the namespaces.
func (w *twin) boot() {
	w.t.Helper()
	const script = `mount --bind "$1" "$2" && ip link set lo up && : > "$2/booted" && while :; do sleep 3600 & wait $!; done`
	w.holder = exec.Command("unshare", "--mount", "--propagation", "private", "--net", "--pid", "--fork", "--kill-child", "--mount-proc",
		"sh", "-c", script, "sh", w.real, w.shared)
	check(w.t, w.holder.Start())
	eventually(w.t, "the namespaces are there", patience, func() bool {
		w.init = childOf(w.holder.Process.Pid)
		_, err := os.Stat(filepath.Join(w.real, "booted"))
		return err == nil && w.init != 0
	})
}

// powerOff ends every process of the node, and with them its namespaces.
func (w *twin) powerOff() {
	w.hangUp()
	_ = w.holder.Process.Kill()
	_ = w.holder.Wait()
	if w.daemon != nil {
		_ = w.daemon.Wait()
	}
	w.daemon = nil
	check(w.t, os.Remove(filepath.Join(w.real, "booted")))
}

func (w *twin) end() {
	if w.daemon != nil {
		pods, err := w.cri.ListPodSandbox(limited(w.t), &runtimeapi.ListPodSandboxRequest{})
		check(w.t, err)
		for _, pod := range pods.GetItems() {
			w.remove(pod.Id)
		}
		check(w.t, unix.Kill(childOf(w.daemon.Process.Pid), unix.SIGTERM))
		check(w.t, w.daemon.Wait())
		w.daemon = nil
	}
	w.powerOff()
}

// inside is a command in the node's namespaces.
func (w *twin) inside(arguments ...string) *exec.Cmd {
	return exec.Command("nsenter", append([]string{"--target", strconv.Itoa(w.init), "--mount", "--net", "--pid", "--"}, arguments...)...)
}

func (w *twin) start() {
	w.t.Helper()
	w.daemon = w.inside(w.flags...)
	log, err := os.OpenFile(filepath.Join(w.real, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	check(w.t, err)
	defer log.Close()
	w.daemon.Stderr = log
	check(w.t, w.daemon.Start())
	connection, err := grpc.NewClient(fmt.Sprintf("unix:///proc/%d/root%s/sock", w.init, w.shared), grpc.WithTransportCredentials(insecure.NewCredentials()))
	check(w.t, err)
	w.hangUp = func() { connection.Close() }
	w.cri = runtimeapi.NewRuntimeServiceClient(connection)
	eventually(w.t, "the daemon is ready", patience, func() bool {
		connection.ResetConnectBackoff()
		answer, err := w.cri.Status(limited(w.t), &runtimeapi.StatusRequest{})
		return err == nil && answer.Status.Conditions[1].Status
	})
}

// restart kills the daemon and starts another one.
func (w *twin) restart() {
	w.t.Helper()
	w.hangUp()
	check(w.t, unix.Kill(childOf(w.daemon.Process.Pid), unix.SIGKILL))
	_ = w.daemon.Wait() // it was killed
	w.start()
}

func (w *twin) run(name string) (id string) {
	w.t.Helper()
	answer, err := w.cri.RunPodSandbox(limited(w.t), &runtimeapi.RunPodSandboxRequest{Config: &runtimeapi.PodSandboxConfig{
		Metadata:     &runtimeapi.PodSandboxMetadata{Name: name, Namespace: "twins", Uid: name},
		LogDirectory: w.shared + "/logs/" + name,
		Linux:        &runtimeapi.LinuxPodSandboxConfig{},
	}})
	check(w.t, err)
	return answer.GetPodSandboxId()
}

func (w *twin) remove(id string) {
	w.t.Helper()
	_, err := w.cri.StopPodSandbox(limited(w.t), &runtimeapi.StopPodSandboxRequest{PodSandboxId: id})
	check(w.t, err)
	_, err = w.cri.RemovePodSandbox(limited(w.t), &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id})
	check(w.t, err)
}

func (w *twin) status(id string) *runtimeapi.PodSandboxStatus {
	w.t.Helper()
	answer, err := w.cri.PodSandboxStatus(limited(w.t), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id})
	check(w.t, err)
	return answer.GetStatus()
}

// childOf is the child of a process that has one, 0 if it has none yet.
func childOf(pid int) int {
	children, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", pid))
	child, _ := strconv.Atoi(strings.TrimSpace(string(children)))
	return child
}

// Two nodes with the same paths, in namespaces of their own, do not touch what is
// the other's: at a start, with its sweep, at Stop and Remove, with check --fix, and
// when one of them ends and boots again, after which its pods are NotReady and their
// addresses come back.
func TestTwoNodesOfOnePath(t *testing.T) {
	a, b := newTwins(t)
	ofA, ofB := a.run("a"), b.run("b")
	wasA, wasB := a.status(ofA), b.status(ofB)
	intact := func(after string) {
		t.Helper()
		for _, pod := range []struct {
			twin *twin
			was  *runtimeapi.PodSandboxStatus
		}{{a, wasA}, {b, wasB}} {
			if now := pod.twin.status(pod.was.Id); now.String() != pod.was.String() || now.State != runtimeapi.PodSandboxState_SANDBOX_READY {
				t.Errorf("after %s: the pod was %v\nand is %v", after, pod.was, now)
			}
		}
	}
	for _, w := range []*twin{a, b, a} {
		w.restart()
		intact("a restart")
	}
	for _, w := range []*twin{a, b} {
		output, err := w.inside(append([]string{w.flags[0], "check", "--fix"}, w.flags[1:]...)...).CombinedOutput()
		if err != nil {
			t.Errorf("check --fix: %v\n%s", err, output)
		}
		intact("check --fix")
	}
	more := a.run("more")
	a.remove(more)
	intact("Stop and Remove")

	b.powerOff()
	b.boot()
	b.start()
	if now := b.status(ofB); now.State != runtimeapi.PodSandboxState_SANDBOX_NOTREADY || now.CreatedAt != wasB.CreatedAt {
		t.Errorf("a pod of a node that has booted again is %v", now)
	}
	eventually(t, "its address comes back", patience, func() bool {
		left, _ := filepath.Glob(filepath.Join(b.real, "addresses", "*", "10.*"))
		return len(left) == 0
	})
	wasB = b.status(b.run("again"))
	b.restart()
	intact("the other node's boot")
}
