package kubelet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/moby/sys/mountinfo"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

const (
	nodeName = "node"
	// imageName is the image that all containers are made from.
	imageName = "test.example/plain:1"
	// nodeAddress is for documentation (RFC 5737). A kubelet wants an address
	// that is not a loopback one; it may be of the loopback device.
	nodeAddress = "192.0.2.1"
)

var plainConfig = nodetest.Object{"Env": []string{"PATH=/bin"}}

// kubelet is a real kubelet without an API server, on a node of its own.
type kubelet struct {
	*nodetest.Node
	t        testing.TB
	binary   string
	dir      string        // holds all that it writes
	mounts   *os.File      // its mount namespace
	endpoint string        // of the runtime
	server   string        // where its API is reached
	process  *exec.Cmd     // of the last start
	ended    chan struct{} // closed when process has ended
	marks    []int         // places in its log
}

// newKubelet makes a node with the image, and all that a kubelet needs to start.
func newKubelet(t testing.TB, options ...nodetest.Option) *kubelet {
	n := nodetest.New(t, append(options, nodetest.Config("[streaming]\naddress = '127.0.0.1:10010'"))...)
	n.BuildImage(imageName, plainConfig, n.AddBusybox)
	binary, err := filepath.Abs(filepath.Join("../../bin/kubelet", os.Getenv("KUBERNETES"), "kubelet"))
	harness.Check(t, err)
	_, err = os.Stat(binary)
	harness.Need(t, err == nil, "the kubelet is absent, run 'make kubelet': %v", err)
	k := &kubelet{Node: n, t: t, binary: binary, dir: filepath.Join(n.Dir, "kubelet"), endpoint: "unix://" + n.Socket}
	for _, dir := range []string{"root", "fixed", "manifests", "logs", "certificates", "plugins", "home"} {
		harness.Check(t, os.MkdirAll(k.path(dir), 0o755))
	}
	harness.Check(t, os.WriteFile(k.path("resolv.conf"), []byte("nameserver 192.0.2.53\n"), 0o644))
	n.RunInNetns(addNodeAddress)
	k.mounts = newMountNamespace(t, n, k.path("fixed"), k.path("root"))
	k.server = n.Relay("127.0.0.1:10250")
	t.Cleanup(k.removeCgroups)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the kubelet's log:\n%s", k.log())
		}
	})
	return k
}

func addNodeAddress() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	address, err := netlink.ParseAddr(nodeAddress + "/32")
	return errors.Join(err, netlink.AddrAdd(lo, address))
}

func (k *kubelet) path(name string) string { return filepath.Join(k.dir, name) }

// start starts the kubelet with these feature gates, and waits until it answers.
func (k *kubelet) start(gates nodetest.Object) {
	k.configure(gates)
	log, err := os.OpenFile(k.path("log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	harness.Check(k.t, err)
	defer log.Close()
	k.process = exec.Command(k.binary, "--config", k.path("config.json"), "--root-dir", k.path("root"),
		"--cert-dir", k.path("certificates"), "--hostname-override", nodeName, "--node-ip", nodeAddress, "--v", "4")
	k.process.Dir, k.process.Env = k.dir, []string{"PATH=" + os.Getenv("PATH"), "HOME=" + k.path("home"), "TMPDIR=" + k.path("home")}
	k.process.Stdout, k.process.Stderr = log, log
	k.process.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	k.RunInNetns(func() error {
		// Threads share the working directory, and one that does cannot join.
		if err := errors.Join(unix.Unshare(unix.CLONE_FS), unix.Setns(int(k.mounts.Fd()), unix.CLONE_NEWNS)); err != nil {
			return err
		}
		return k.process.Start()
	})
	process, ended := k.process, make(chan struct{})
	k.ended = ended
	go func() {
		process.Wait() // its error is looked at by stop
		close(ended)
	}()
	k.t.Cleanup(k.kill)
	k.eventually("the kubelet answers", func() bool {
		k.alive()
		body, err := k.ask(http.MethodGet, "/healthz")
		return err == nil && body == "ok"
	})
}

// limited is for calls that have no limit of their own.
func (k *kubelet) limited() context.Context { return harness.Limited(k.t) }

func (k *kubelet) eventually(what string, holds func() bool) {
	harness.Eventually(k.t, what, holds)
}

// alive ends the test when the kubelet has ended.
func (k *kubelet) alive() {
	k.t.Helper()
	select {
	case <-k.ended:
		k.t.Fatalf("the kubelet ended: %v", k.process.ProcessState)
	default:
	}
}

// stop ends the kubelet with SIGTERM. Its pods stay.
func (k *kubelet) stop() {
	k.t.Helper()
	harness.Check(k.t, k.process.Process.Signal(unix.SIGTERM))
	<-k.ended
	harness.Want(k.t, k.process.ProcessState.Success(), "after SIGTERM the kubelet ended with %v", k.process.ProcessState)
}

// kill ends a kubelet that a failed test has left.
func (k *kubelet) kill() {
	_ = k.process.Process.Kill() // it may have ended by now
	<-k.ended
}

// configure writes the kubelet's configuration. What is not about paths keeps a shared machine alone: no evictions,
// no collection of images, no changes of its own oom_score_adj, which some machines refuse. The periods are shorter
// than a node would have them.
func (k *kubelet) configure(gates nodetest.Object) {
	config := nodetest.Object{
		"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
		"containerRuntimeEndpoint": k.endpoint,
		"cgroupRoot":               strings.TrimSuffix(k.CgroupParent, ".slice"), "failCgroupV1": false, // the driver systemd adds it
		"staticPodPath": k.path("manifests"), "fileCheckFrequency": "1s", "syncFrequency": "2s",
		"podLogsDir": k.path("logs"), "volumePluginDir": k.path("plugins"), "resolvConf": k.path("resolv.conf"),
		"address": "127.0.0.1", "healthzPort": 0,
		"authentication": nodetest.Object{"anonymous": nodetest.Object{"enabled": true}, "webhook": nodetest.Object{"enabled": false}},
		"authorization":  nodetest.Object{"mode": "AlwaysAllow"},
		"evictionHard": nodetest.Object{
			"memory.available": "0%", "nodefs.available": "0%", "nodefs.inodesFree": "0%",
			"imagefs.available": "0%", "imagefs.inodesFree": "0%", "pid.available": "0%",
		},
		"imageGCHighThresholdPercent": 100, "failSwapOn": false, "oomScoreAdj": 0, "makeIPTablesUtilChains": false,
		"volumeStatsAggPeriod": "1s",
		"featureGates":         gates,
	}
	if gates["DefaultPodSysctls"] != nil {
		config["defaultPodSysctls"] = nodetest.Object{"net.core.somaxconn": "555", "net.ipv4.ip_unprivileged_port_start": "777"}
	}
	data, err := json.MarshalIndent(config, "", "  ")
	harness.Check(k.t, err)
	harness.Check(k.t, os.WriteFile(k.path("config.json"), data, 0o600))
}

// removeCgroups removes the cgroups that a kubelet makes for classes of pods and keeps. They have to be empty.
func (k *kubelet) removeCgroups() {
	if node, isSlice := strings.CutSuffix(filepath.Base(k.CgroupParent), ".slice"); isSlice {
		output, err := exec.Command("systemctl", "stop", node+"-kubepods.slice").CombinedOutput()
		harness.Want(k.t, err == nil, "stop the slices of classes: %v: %s", err, output)
		return
	}
	hierarchies := harness.Glob(k.t, "/sys/fs/cgroup/*", k.CgroupParent)
	for _, hierarchy := range append(hierarchies, filepath.Join("/sys/fs/cgroup", k.CgroupParent)) {
		for _, class := range []string{"kubepods/burstable", "kubepods/besteffort", "kubepods"} {
			err := os.Remove(filepath.Join(hierarchy, class))
			harness.Want(k.t, err == nil || os.IsNotExist(err), "%v", err)
		}
	}
}

// runtimeError is a line of klog's, at the level Error or above, that is about the runtime: what it answered, or what
// became of a pod that it should run. Others are about the machine, or about what a kubelet without an API server
// lacks.
var runtimeError = regexp.MustCompile(`^[EF][0-9]{4} .*(rpc error|[Rr]untime|PLEG|[Ss]andbox|[Ii]mage|pod_workers|prober)`)

// harmless are complaints that are no errors of a runtime, each with its reason.
var harmless = []struct{ text, why string }{
	{"container runtime status check may not have completed yet", "the kubelet has just started"},
	{"PLEG is not healthy: pleg has yet to be successful", "the same, a moment later"},
	{"no imagefs label for configured runtime", "cAdvisor knows other runtimes by name"},
	{"Missing actuated pod level resource record", "the kubelet's own notes about a pod whose start was interrupted"},
	{"code = Canceled desc = context canceled", "the kubelet gives up its own probe when the pod is deleted"},
	{"it ended while the command was being started", "the kubelet probes a container that ends with its pod"},
	{"is exited, and has to be created or running", "the same, a moment later"},
	{"it does not run", "the same, a moment earlier"},
	{"pod sandbox id is empty", "by this call the kubelet finds out whether the runtime implements it"},
	{"code = NotFound", "the kubelet asks again for what it has just removed"},
}

// down are the complaints of the time without a daemon. The error of a call that was under way when it was killed
// comes without its code in some places: the texts are gRPC's for a connection that is gone.
var down = regexp.MustCompile("code = Unavailable|container runtime is down|\"Failed to stop sandbox\"|PLEG is not healthy|" +
	"error reading from server|connection error: desc|closing transport|connection reset by peer|broken pipe")

// markLog remembers where the kubelet's log ends now: it is called twice around the time in which there is no daemon.
func (k *kubelet) markLog() { k.marks = append(k.marks, len(k.log())) }

func (k *kubelet) log() string { return string(harness.Read(k.t, k.path("log"))) }

// checkLog fails the test for every error of the runtime's in the kubelet's log,
// and for settings of the machine that it changed.
func (k *kubelet) checkLog() {
	log := k.log()
	harness.Want(k.t, !strings.Contains(log, "Updating kernel flag"), "the kubelet changed a setting of the machine's kernel")
	at := 0
	for line := range strings.Lines(log) {
		isDown := at >= k.marks[0] && at < k.marks[1]
		at += len(line)
		isHarmless := slices.ContainsFunc(harmless, func(h struct{ text, why string }) bool { return strings.Contains(line, h.text) })
		harness.Want(k.t, !runtimeError.MatchString(line) || isHarmless || isDown && down.MatchString(line),
			"the kubelet complains (the daemon is down: %t): %s", isDown, line)
	}
}

// overlaid are the directories in which a kubelet has fixed paths, whatever its
// configuration is: /var/lib/kubelet/device-plugins, /var/log/containers.
var overlaid = []string{"/var/lib", "/var/log"}

// cadvisorDir has the socket of the runtime that the kubelet's cAdvisor asks.
const cadvisorDir = "/run/containerd"

// sysctls are what a kubelet makes of the kernel's settings when it starts. In its mount namespace they have these
// values already, so it leaves alone those of the machine, which also would have to be restored.
var sysctls = map[string]string{
	"vm/overcommit_memory":      "1",
	"vm/panic_on_oom":           "0",
	"kernel/panic":              "10",
	"kernel/panic_on_oops":      "1",
	"kernel/keys/root_maxkeys":  "1000000",
	"kernel/keys/root_maxbytes": "25000000",
}

// newMountNamespace makes the kubelet's mount namespace, in which the machine's files are as they are, and what the
// kubelet writes to fixed paths goes to dir. Of the kubelet's mounts only those below shared leave the namespace:
// there are the volumes, which the runtime has to see.
func newMountNamespace(t testing.TB, n *nodetest.Node, dir, shared string) *os.File {
	harness.Check(t, unix.Mount(shared, shared, "", unix.MS_BIND, ""))
	t.Cleanup(func() { harness.Check(t, unix.Unmount(shared, unix.MNT_DETACH)) })
	harness.Check(t, unix.Mount("", shared, "", unix.MS_SHARED, ""))
	var namespace *os.File
	// The thread that this runs on ends with it.
	n.RunInNetns(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		if err := isolate(dir, shared, n.Dir); err != nil {
			return err
		}
		namespace, err = os.Open("/proc/thread-self/ns/mnt")
		return err
	})
	t.Cleanup(func() { harness.Check(t, namespace.Close()) })
	return namespace
}

func isolate(dir, shared, runtime string) error {
	if err := enslaveAllBut(shared); err != nil {
		return err
	}
	// cAdvisor looks for containerd there.
	if err := errors.Join(os.MkdirAll(cadvisorDir, 0o711), unix.Mount(runtime, cadvisorDir, "", unix.MS_BIND, "")); err != nil {
		return fmt.Errorf("bind %s to %s: %w", runtime, cadvisorDir, err)
	}
	// An overlay's upper directory must not be on an overlay, as / often is.
	if err := unix.Mount("kubelet", dir, "tmpfs", 0, ""); err != nil {
		return err
	}
	for _, path := range overlaid {
		if err := overlay(path, filepath.Join(dir, filepath.Base(path))); err != nil {
			return err
		}
	}
	for name, value := range sysctls {
		file := filepath.Join(dir, strings.ReplaceAll(name, "/", "."))
		err := os.WriteFile(file, []byte(value+"\n"), 0o400)
		if err = errors.Join(err, unix.Mount(file, filepath.Join("/proc/sys", name), "", unix.MS_BIND, "")); err != nil {
			return fmt.Errorf("hiding %s: %w", name, err)
		}
	}
	return nil
}

// enslaveAllBut makes mounts slaves: what is mounted and unmounted outside is so here, too, and nothing goes back.
func enslaveAllBut(shared string) error {
	mounts, err := mountinfo.GetMounts(nil)
	if err != nil {
		return err
	}
	for _, m := range mounts {
		if m.Mountpoint != shared {
			failed := unix.Mount("", m.Mountpoint, "", unix.MS_SLAVE, "")
			if failed == unix.EINVAL || failed == unix.ENOENT {
				continue // it was unmounted since
			}
			err = errors.Join(err, os.NewSyscallError("making a slave of "+m.Mountpoint, failed))
		}
	}
	return err
}

func overlay(path, dir string) error {
	upper, work := filepath.Join(dir, "upper"), filepath.Join(dir, "work")
	if err := errors.Join(os.MkdirAll(upper, 0o755), os.MkdirAll(work, 0o755)); err != nil {
		return err
	}
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", path, upper, work)
	return os.NewSyscallError("an overlay on "+path, unix.Mount("overlay", path, "overlay", 0, options))
}
