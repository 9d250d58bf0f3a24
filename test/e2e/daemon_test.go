package e2e

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

func TestSecondDaemonOnTheSameDirectoriesIsRefused(t *testing.T) {
	n := newNode(t)
	id := n.RunPod(n.PodConfig("web"))
	other := filepath.Join(n.Dir, "o") // short: sockets are below the state directory
	for name, flags := range harness.Sorted(map[string][]string{
		n.Root:   {"--state", other + "s", "--socket", other + ".sock"},
		n.State:  {"--root", other + "r", "--socket", other + ".sock"},
		n.Socket: {"--root", other + "r", "--state", other + "s", "--netns-dir", other + "-netns"},
	}) {
		output, err := n.RunDaemon(flags...)
		harness.Want(t, err != nil && strings.Contains(output, name), "%s: want an error that names it, got %v: %s", name, err, output)
	}
	if info, err := os.Stat(n.Socket); err != nil || info.Mode() != os.ModeSocket|0o600 || !ready(t, n, id) {
		t.Errorf("the first daemon's pod is gone, or others can ask it: %v, %v", info, err)
	}
}

// cri: PodSandboxConfig.metadata PodSandboxMetadata.attempt PodSandboxMetadata.name PodSandboxStatus.metadata
// cri: PodSandboxStatus.state
func TestProperty23_RestartChangesNothing(t *testing.T) {
	n, r := newRecorded(t, "")
	before := map[string]*runtimeapi.PodSandboxStatus{}
	pids := map[string]int{}
	for _, config := range []*runtimeapi.PodSandboxConfig{
		n.PodConfig("a"), n.PodConfig("b", nodetest.Attempt(2)), n.PodConfig("host", nodetest.HostNetwork()), n.PodConfig("stopped"),
	} {
		id := n.RunPod(config)
		pids[id] = pausePID(t, n, id)
		if config.Metadata.Name == "stopped" {
			check(t, stop(t, n, id))
		}
		before[id] = podStatus(t, n, id)
	}
	for _, restart := range []func(){n.Kill, n.Stop} {
		restart()
		r.forget()
		n.Start()
		for id, status := range before {
			harness.Want(t, proto.Equal(podStatus(t, n, id), status), "before: %v\nafter: %v", status, podStatus(t, n, id))
			if status.State == runtimeapi.PodSandboxState_SANDBOX_READY {
				harness.Same(t, "pause process", pausePID(t, n, id), pids[id])
			}
		}
		harness.Same(t, "runs of plugins", sequence(r.calls("")), "")
	}
	harness.Want(t, len(list(t, n, nil)) == len(before), "listed: %v", list(t, n, nil))
	// The names are reserved again, also that of a pod that is stopped, until it is removed.
	for id, status := range before {
		config := n.PodConfig(status.Metadata.Name, nodetest.Attempt(status.Metadata.Attempt))
		switch {
		case status.Metadata.Name == "host":
		case status.State == runtimeapi.PodSandboxState_SANDBOX_READY:
			harness.Same(t, "the sandbox of a pod that has one", n.RunPod(config), id)
		default:
			_, err := run(t, n, config)
			nodetest.WantCode(t, err, codes.AlreadyExists)
			check(t, remove(t, n, id))
			harness.Want(t, n.RunPod(config) != id, "a removed sandbox came back")
		}
	}
}

// A pause that dies is seen by a daemon that did not start it, and is in the pod's timeline.
func TestPauseThatDiesIsSeen(t *testing.T) {
	n := newNode(t)
	id := n.RunPod(n.PodConfig("web"))
	n.Crash()
	check(t, unix.Kill(pausePID(t, n, id), unix.SIGKILL))
	harness.Eventually(t, "the pod is NotReady", func() bool { return !ready(t, n, id) })
	failed, err := n.RunCommand("timeline", "--failed")
	check(t, err)
	harness.Want(t, strings.Contains(failed, "the pod, pause: the pause process ended by itself"), "the timeline is %s", failed)
}

// A daemon that was started from a shell with umask 077 makes what containers of any user can read, and pods
// with user namespaces.
func TestUmaskOfTheShellChangesNothing(t *testing.T) {
	n := nodetest.New(t) // alone: the umask is that of all tests
	files := func(id string) (modes string) {
		for _, name := range []string{"", id + "/hostname", id + "/hosts", id + "/resolv.conf", "shm"} {
			info, err := os.Stat(filepath.Join(n.State, "sandboxes", id, name))
			check(t, err)
			modes += " " + filepath.Base(name) + "=" + info.Mode().String()
		}
		return modes
	}
	before := files(n.RunPod(n.PodConfig("before")))
	n.Stop()
	mask := unix.Umask(0o077)
	err := n.TryStart()
	unix.Umask(mask)
	check(t, err)
	harness.Same(t, "with umask 077", files(n.RunPod(n.PodConfig("after"))), before)
	harness.Want(t, ready(t, n, n.RunPod(n.PodConfig("users", userNamespace(0, 200000, 65536)))),
		"a pod with a user namespace is not ready")
}

// Neither SIGHUP nor SIGUSR1 ends a daemon that starts, from its first line in the log on.
func TestSignalsDoNotEndTheDaemon(t *testing.T) {
	n := newNode(t)
	id := n.RunPod(n.PodConfig("web"))
	n.Kill()
	said := len(n.Log())
	until, started := context.WithCancel(t.Context())
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		for until.Err() == nil {
			log, _ := os.ReadFile(filepath.Join(n.Dir, "daemon.log"))
			if len(log) > said {
				_ = unix.Kill(daemonOf(n.Socket), unix.SIGHUP) // it may not be found yet
				_ = unix.Kill(daemonOf(n.Socket), unix.SIGUSR1)
			}
		}
	}()
	err := n.TryStart()
	started()
	<-stopped
	check(t, err)
	harness.Want(t, ready(t, n, id), "the pod is not ready")
}

// daemonOf is the process that was started with the socket, one that no signal reaches if there is none.
func daemonOf(socket string) int {
	for _, p := range harness.Processes() {
		if filepath.Base(p.Args[0]) == "minicri" && slices.Contains(p.Args, socket) {
			return p.PID
		}
	}
	return 1 << 30
}

// What metrics_address shows over TLS: the daemon's own, with the last reload, images and the disk, and those
// of pods under cAdvisor's names.
func TestMetricsAddress(t *testing.T) {
	cert, key, pool := filepath.Join(t.TempDir(), "cert.pem"), filepath.Join(t.TempDir(), "key.pem"), x509.NewCertPool()
	pool.AppendCertsFromPEM(nodetest.Certificate(t, cert, key, time.Hour))
	n := newNode(t, nodetest.Config(fmt.Sprintf("log_format = 'text'\nmetrics_address = '127.0.0.1:9440'\nmetrics_tls_cert = '%s'\nmetrics_tls_key = '%s'\n", cert, key)))
	n.RunPod(n.PodConfig("shown"))
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: pool},
		DialContext: func(_ context.Context, _, address string) (net.Conn, error) { return n.Dial(address) },
	}}
	shows := func(path, text string) {
		harness.Eventually(t, path+" shows "+text, func() bool {
			answer, err := client.Get("https://127.0.0.1:9440" + path)
			if err != nil {
				return false // it does not listen yet
			}
			defer answer.Body.Close()
			body, err := io.ReadAll(answer.Body)
			return err == nil && strings.Contains(string(body), text)
		})
	}
	for _, text := range []string{
		"\nminicri_config_last_reload_successful 1\n", "\nminicri_config_last_reload_success_timestamp_seconds 1", "\nminicri_images ", "\nminicri_disk_free_bytes ", "\nminicri_disk_free_inodes ",
	} {
		shows("/metrics", text)
	}
	shows("/metrics/cadvisor", `pod="shown"`)
	n.Kill()
	taken := n.Listen("127.0.0.1:9440")
	n.Start()
	harness.Eventually(t, "the log says that the address is taken", func() bool { return strings.Contains(n.Log(), "metrics are not served") })
	check(t, taken.Close())
	rewrite(t, n, "log_format = 'text'", "log_format = 'loud'")
	check(t, syscall.Kill(n.PID(), syscall.SIGHUP))
	shows("/metrics", "\nminicri_config_last_reload_successful 0\n")
}

// Status says that pods can be made, and what this build and this kernel can do, of the runtime and of each
// handler; verbose, the network and the configuration in effect.
//
// cri: RuntimeCondition.status RuntimeCondition.type RuntimeStatus.conditions StatusResponse.info
// cri: StatusResponse.status StatusResponse.features RuntimeFeatures.supplemental_groups_policy
// cri: RuntimeFeatures.mount_options RuntimeHandler.features RuntimeHandlerFeatures.recursive_read_only_mounts
// cri: RuntimeHandlerFeatures.user_namespaces RuntimeHandler.name StatusResponse.runtime_handlers
// cri: LinuxRuntimeConfiguration.cgroup_driver RuntimeConfig RuntimeConfigResponse.linux
func TestStatusOfANode(t *testing.T) {
	n := newNode(t)
	answer := nodetest.Call(t, n.Runtime.Status, &runtimeapi.StatusRequest{})
	found := map[string]bool{}
	for _, condition := range answer.Status.Conditions {
		found[condition.Type] = condition.Status
	}
	if f := answer.Features; !found[runtimeapi.RuntimeReady] || !found[runtimeapi.NetworkReady] || len(answer.Info) != 0 || !f.GetSupplementalGroupsPolicy() || !f.GetMountOptions() {
		t.Errorf("got %v", answer)
	}
	harness.Want(t, len(answer.RuntimeHandlers) != 0 && answer.RuntimeHandlers[0].Name == "",
		"the default handler is not listed: %v", answer.RuntimeHandlers)
	for _, handler := range answer.RuntimeHandlers {
		// Both came to Linux before 5.19, and this test runs on nothing older.
		f := handler.GetFeatures()
		harness.Want(t, f.GetRecursiveReadOnlyMounts() && f.GetUserNamespaces(), "handler %q has the features %v", handler.GetName(), f)
	}
	network, config := nodetest.Info[struct{ Name, File string }](t, n, "cniconfig"), nodetest.Info[map[string]any](t, n, "config")
	harness.Want(t, network.Name == n.Network, "the network is %+v, the configuration %v", network, config)
	harness.Want(t, network.File != "", "the network is %+v, the configuration %v", network, config)
	harness.Want(t, config["root"] == n.Root, "the network is %+v, the configuration %v", network, config)
	info := statusInfo(t, n)
	for key, value := range info {
		// crictl shows an object as it is, and anything else as text with its quotes escaped.
		harness.Want(t, json.Valid([]byte(value)), "info %s is no JSON object: %s", key, value)
		harness.Want(t, strings.HasPrefix(value, "{") || key == "golang" || key == "config",
			"info %s is no JSON object: %s", key, value)
	}
	_, hides := info["runtimeHandlers"]
	harness.Want(t, !hides, "info hides crictl's own list of runtimeHandlers")
	driver := nodetest.Call(t, n.Runtime.RuntimeConfig, &runtimeapi.RuntimeConfigRequest{})
	harness.Want(t, strings.ToLower(driver.Linux.GetCgroupDriver().String()) == harness.CgroupDriver(), "got %v", driver)
}

// Checkpoints are refused, whatever is asked for, with the code by which the kubelet knows that they are not
// there; nothing is written.
//
// cri: CheckpointContainer CheckpointContainerRequest.container_id CheckpointContainerRequest.location
// cri: CheckpointContainerRequest.timeout CheckpointPod CheckpointPodRequest.container_ids CheckpointPodRequest.options
// cri: CheckpointPodRequest.output_path CheckpointPodRequest.pod_sandbox_id RestorePod RestorePodRequest.checkpoint_path
// cri: RestorePodRequest.config RestorePodRequest.container_configs RestorePodRequest.options
// cri: RestorePodRequest.runtime_handler
func TestWhatIsNotThereYetIsUnimplemented(t *testing.T) {
	n := newNode(t)
	pod, dir := n.RunPod(n.PodConfig("web")), t.TempDir()
	config, options := n.PodConfig("restored"), map[string]string{"leave-running": "true"}
	_, container := n.Runtime.CheckpointContainer(harness.Limited(t), &runtimeapi.CheckpointContainerRequest{ContainerId: pod, Location: filepath.Join(dir, "archive.tar"), Timeout: 10})
	_, sandbox := n.Runtime.CheckpointPod(harness.Limited(t), &runtimeapi.CheckpointPodRequest{PodSandboxId: pod, OutputPath: dir, ContainerIds: []string{pod}, Options: options})
	_, restore := n.Runtime.RestorePod(harness.Limited(t), &runtimeapi.RestorePodRequest{
		CheckpointPath: dir, Config: config, Options: options, RuntimeHandler: "kata",
		ContainerConfigs: []*runtimeapi.ContainerConfig{{Metadata: &runtimeapi.ContainerMetadata{Name: "app"}}},
	})
	for _, err := range []error{container, sandbox, restore} {
		nodetest.WantCode(t, err, codes.Unimplemented)
	}
	wantPods(t, n, pod)
	written, err := os.ReadDir(dir)
	harness.Want(t, err == nil && len(written) == 0, "written: %v, %v", written, err)
}
