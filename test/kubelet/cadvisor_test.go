package kubelet

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/oci/pause"
	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

const containerdPause = "test.example/pause:1"

const containerdConfig = `version = 3
root = '%[1]s/root'
state = '%[1]s/state'
[grpc]
address = '%[1]s.sock'
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = '%[2]s'
[plugins.'io.containerd.cri.v1.runtime']
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true
[plugins.'io.containerd.cri.v1.runtime'.cni]
conf_dir = '%[3]s'
bin_dirs = ['%[4]s']
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = 'io.containerd.runc.v2'
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
SystemdCgroup = %[5]t
[plugins.'io.containerd.nri.v1.nri']
disable = true
`

// runContainerd stops minicri and runs containerd for the kubelet, on the same path, until the test ends.
func (k *kubelet) runContainerd() {
	k.Stop()
	k.t.Cleanup(k.Start)
	dir := filepath.Join(k.Dir, "containerd")
	harness.Check(k.t, os.Mkdir(dir, 0o755))
	config := filepath.Join(dir, "config.toml")
	isSystemd := harness.CgroupDriver() == "systemd"
	text := fmt.Sprintf(containerdConfig, dir, containerdPause, k.CNIConf, k.CNIBin, isSystemd)
	harness.Check(k.t, os.WriteFile(config, []byte(text), 0o600))
	bin, err := filepath.Abs("../../bin/containerd")
	harness.Check(k.t, err)
	log, err := os.Create(filepath.Join(dir, "log"))
	harness.Check(k.t, err)
	defer log.Close()
	daemon := exec.Command(filepath.Join(bin, "containerd"), "--config", config)
	daemon.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"))
	daemon.Stdout, daemon.Stderr = log, log
	k.RunInNetns(daemon.Start)
	k.t.Cleanup(func() {
		if k.t.Failed() {
			k.t.Logf("the log of containerd:\n%s", harness.Read(k.t, log.Name()))
		}
		harness.Check(k.t, daemon.Process.Signal(syscall.SIGTERM))
		harness.Check(k.t, daemon.Wait())
	})
	k.endpoint = "unix://" + dir + ".sock"
	conn, err := grpc.NewClient(k.endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()))
	harness.Check(k.t, err)
	k.t.Cleanup(func() { _ = conn.Close() })
	k.Runtime = runtimeapi.NewRuntimeServiceClient(conn)
	k.eventually("containerd answers", func() bool {
		conn.ResetConnectBackoff()
		_, err := k.Runtime.Version(k.limited(), &runtimeapi.VersionRequest{})
		return err == nil
	})
	program, err := pause.Binary()
	harness.Check(k.t, err)
	addPause := func(l *nodetest.Layer) { l.File("pause", 0o755, 0, string(program)) }
	for _, archive := range []string{
		k.WriteImage(imageName, plainConfig, k.AddBusybox),
		k.WriteImage(containerdPause, nodetest.Object{"Entrypoint": []string{"/pause"}}, addPause),
	} {
		flags := []string{"--address", dir + ".sock", "--namespace", "k8s.io", "images", "import", archive}
		output, err := exec.Command(filepath.Join(bin, "ctr"), flags...).CombinedOutput()
		harness.Need(k.t, err == nil, "import %s: %v: %s", archive, err, output)
		harness.Check(k.t, os.Remove(archive))
	}
}

// A kubelet with default gates has the same series with the same labels beside minicri and beside containerd: for
// dashboards, and for kubectl top.
func TestMetricsAreThoseOfContainerd(t *testing.T) {
	series := make(map[string][]string)
	var lock sync.Mutex
	t.Run("kubelets", func(t *testing.T) {
		for _, runtime := range []string{"minicri", "containerd"} {
			t.Run(runtime, func(t *testing.T) {
				k := newKubelet(t, nodetest.Parallel())
				if runtime == "containerd" {
					k.runContainerd()
				}
				k.start(nil)
				k.apply("pair", pair)
				k.apply("host", host)
				k.apply("load", load)
				found := k.awaitSeries()
				lock.Lock()
				series[runtime] = found
				lock.Unlock()
				k.checkEverythingGoes()
				k.stop()
			})
		}
	})
	ours, theirs := series["minicri"], series["containerd"]
	t.Logf("%d series", len(theirs))
	for _, one := range theirs {
		harness.Want(t, slices.Contains(ours, one), "beside containerd alone: %s", one)
	}
	for _, one := range ours {
		harness.Want(t, slices.Contains(theirs, one), "beside minicri alone: %s", one)
	}
}

var (
	anyID  = regexp.MustCompile(`[0-9a-f]{64}`)
	podUID = regexp.MustCompile(`pod[0-9a-f]{32}`)
	// sample is a line of Prometheus' form about a pod or a container.
	sample = regexp.MustCompile(`(?m)^(?:container|pod)_[a-z_]+\{.*\} `)
)

// awaitSeries returns the series and the fields of the summary about the node's pods after the kubelet has measured all
// containers.
func (k *kubelet) awaitSeries() (series []string) {
	k.eventually("the containers are measured", func() bool {
		series = k.series()
		has := func(parts ...string) bool {
			lacks := func(one string) bool {
				return slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(one, part) })
			}
			return slices.ContainsFunc(series, func(one string) bool { return !lacks(one) })
		}
		for pod, containers := range map[string][]string{
			"pair-node": {"sidecar", "server", "client"}, "host-node": {"server"}, "load-node": {"burn", "hold"},
		} {
			label, summary := fmt.Sprintf("pod=%q", pod), fmt.Sprintf("summary[%s]", pod)
			if !has(summary+".cpu.usageNanoCores") || !has(summary+".ephemeral-storage.usedBytes") ||
				pod != "host-node" && !has("/metrics/cadvisor container_network_receive_bytes_total{", label) {
				return false
			}
			for _, name := range containers {
				is, one := fmt.Sprintf("container=%q", name), fmt.Sprintf("%s.containers[%s]", summary, name)
				// Until cAdvisor has measured a container, its CPU and memory in the summary are the runtime's: without
				// pressure on cgroup v1, and beside containerd with available memory although there is no limit.
				isLimited := pod == "load-node"
				if !has("/metrics/cadvisor container_cpu_usage_seconds_total{", label, is) ||
					!has("/metrics/resource container_cpu_usage_seconds_total{", label, is) ||
					!has(one+".cpu.usageNanoCores") || !has(one+".rootfs.usedBytes") ||
					!has(one+".cpu.psi.some.total") || has(one+".memory.availableBytes") != isLimited {
					return false
				}
			}
		}
		// The container accesses the disk before. The init container has ended.
		return k.heldMemory() >= heldFile && !has(`container="prepare"`)
	})
	return series
}

// series returns the present series, with placeholders for names that differ from node to node.
func (k *kubelet) series() (series []string) {
	names := strings.NewReplacer(k.Network, "NODE", containerdPause, "PAUSE", "minicri/pause", "PAUSE")
	for _, path := range []string{"/metrics/cadvisor", "/metrics/resource"} {
		text, err := k.ask(http.MethodGet, path)
		harness.Check(k.t, err)
		for _, one := range sample.FindAllString(text, -1) {
			isOther := path == "/metrics/cadvisor" && !strings.Contains(one, k.Network) ||
				strings.Contains(one, "/minicri-exec-") // the cgroup of a probe, while it runs
			// The series of a disk begin with the first access to it.
			if isOther || strings.HasPrefix(one, "container_fs_") && !strings.Contains(one, `"hold"`) {
				continue
			}
			one = podUID.ReplaceAllString(anyID.ReplaceAllString(one, "ID"), "podUID")
			series = append(series, path+" "+names.Replace(one))
		}
	}
	text, err := k.ask(http.MethodGet, "/stats/summary")
	harness.Check(k.t, err)
	return append(series, summaryFields(k.t, names.Replace(text))...)
}

// summaryFields returns the names of all values of pods and containers in the kubelet's summary.
func summaryFields(t testing.TB, text string) (fields []string) {
	var summary struct{ Pods []any }
	harness.Check(t, json.Unmarshal([]byte(text), &summary))
	var walk func(path string, value any)
	walk = func(path string, value any) {
		switch value := value.(type) {
		case map[string]any:
			if name, isText := value["name"].(string); isText {
				path += "[" + name + "]"
			}
			if reference, isMap := value["podRef"].(map[string]any); isMap {
				path += fmt.Sprintf("[%v]", reference["name"])
			}
			for key, inner := range value {
				walk(path+"."+key, inner)
			}
		case []any:
			for _, inner := range value {
				walk(path, inner)
			}
		default:
			fields = append(fields, path)
		}
	}
	walk("summary", summary.Pods)
	return fields
}
