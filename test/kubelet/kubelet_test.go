package kubelet

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/test/harness"
)

const (
	nodeName = "node"
	// imageName is the image that all containers are made from.
	imageName = "test.example/plain:1"
	// nodeAddress is for documentation (RFC 5737). A kubelet wants an address
	// that is not a loopback one; it may be of the loopback device.
	nodeAddress = "192.0.2.1"
	// patience is the longest that a test waits for what has no limit of its own. A kubelet
	// collects what is dead once a minute.
	patience   = 4 * time.Minute
	syncPeriod = 2 * time.Second // in which the kubelet looks after each pod
)

// kubelet is a real kubelet without an API server, on a node of its own.
type kubelet struct {
	*harness.Node
	t       testing.TB
	binary  string
	dir     string        // holds all that it writes
	mounts  *os.File      // its mount namespace
	server  string        // where its API is reached
	process *exec.Cmd     // of the last start
	ended   chan struct{} // closed when process has ended
	marks   []int         // places in its log
}

// newKubelet makes a node with the image, and all that a kubelet needs to start.
func newKubelet(t testing.TB) *kubelet {
	n := harness.NewNode(t, harness.Config("[streaming]\naddress = '127.0.0.1:10010'"))
	n.BuildImage(imageName, harness.Object{"Env": []string{"PATH=/bin"}}, n.AddBusybox)
	binary, err := filepath.Abs("../../bin/kubelet/kubelet")
	harness.Check(t, err)
	_, err = os.Stat(binary)
	harness.Need(t, err == nil, "the kubelet is absent, run 'make kubelet': %v", err)
	k := &kubelet{Node: n, t: t, binary: binary, dir: filepath.Join(n.Dir, "kubelet")}
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
func (k *kubelet) start(gates harness.Object) {
	k.configure(gates)
	log, err := os.OpenFile(k.path("log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	harness.Check(k.t, err)
	defer log.Close()
	k.process = exec.Command(k.binary, "--config", k.path("config.json"), "--root-dir", k.path("root"),
		"--cert-dir", k.path("certificates"), "--hostname-override", nodeName, "--node-ip", nodeAddress, "--v", "2")
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
func (k *kubelet) limited() context.Context { return harness.Limited(k.t, patience) }

func (k *kubelet) eventually(what string, holds func() bool) {
	harness.Eventually(k.t, what, patience, holds)
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
	select {
	case <-k.ended:
	case <-time.After(time.Minute):
		k.t.Fatal("the kubelet runs a minute after SIGTERM")
	}
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
func (k *kubelet) configure(gates harness.Object) {
	config := harness.Object{
		"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
		"containerRuntimeEndpoint": "unix://" + k.Socket,
		"cgroupRoot":               strings.TrimSuffix(k.CgroupParent, ".slice"), "failCgroupV1": false, // the driver systemd adds it
		"staticPodPath": k.path("manifests"), "fileCheckFrequency": "1s", "syncFrequency": syncPeriod.String(),
		"podLogsDir": k.path("logs"), "volumePluginDir": k.path("plugins"), "resolvConf": k.path("resolv.conf"),
		"address": "127.0.0.1", "healthzPort": 0,
		"authentication": harness.Object{"anonymous": harness.Object{"enabled": true}, "webhook": harness.Object{"enabled": false}},
		"authorization":  harness.Object{"mode": "AlwaysAllow"},
		"evictionHard": harness.Object{
			"memory.available": "0%", "nodefs.available": "0%", "nodefs.inodesFree": "0%",
			"imagefs.available": "0%", "imagefs.inodesFree": "0%", "pid.available": "0%",
		},
		"imageGCHighThresholdPercent": 100, "failSwapOn": false, "oomScoreAdj": 0, "makeIPTablesUtilChains": false,
		"volumeStatsAggPeriod": "1s",
		"featureGates":         gates,
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
			if err := os.Remove(filepath.Join(hierarchy, class)); err != nil && !os.IsNotExist(err) {
				k.t.Error(err)
			}
		}
	}
}
