// Command cluster compares minicri with Debian's containerd under the same kubelet: for each a cluster of one node is
// made by hack/cluster, the same pods are applied, and what is seen by a watch of the API server is printed side by
// side, with the ratio of minicri to containerd. minicri is measured a second time below a kubelet with evented PLEG,
// which Debian's containerd has no events for.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/test/bench/contender"
)

// measured are a runtime under a kubelet with feature gates, in this order; they are compared with the last.
var measured = [3]struct{ name, runtime, gates string }{
	{"minicri", "minicri", ""},
	{"evented", "minicri", "EventedPLEG=true"},
	{"containerd", "containerd", ""},
}

func main() {
	contender.Main("cluster", func(ctx context.Context, dir string) {
		var results [len(measured)]map[string]float64
		for i, m := range measured {
			fmt.Fprintln(os.Stderr, "bench-cluster:", m.name)
			results[i] = measure(ctx, filepath.Join(dir, m.name), "bench-"+m.name, m.runtime, m.gates)
		}
		fmt.Printf("%-58s %12s %12s %12s %18s %18s\n", "", measured[0].name, measured[1].name, measured[2].name, "minicri/cont", "evented/cont")
		for _, row := range rows {
			ours, evented, theirs := results[0][row], results[1][row], results[2][row]
			fmt.Printf("%-58s %12.2f %12.2f %12.2f %18.2f %18.2f\n", row, ours, evented, theirs, ours/theirs, evented/theirs)
		}
	})
}

// measure makes a cluster, measures, and takes it down.
func measure(ctx context.Context, socket, name, runtime, gates string) map[string]float64 {
	cluster := func(arguments ...string) error {
		command := exec.Command("bin/cluster", append([]string{"--name", name}, arguments...)...)
		command.Stdout, command.Stderr = os.Stderr, os.Stderr
		return command.Run()
	}
	up := []string{"up", "--nodes", "1", "--runtime", runtime}
	if gates != "" {
		up = append(up, "--kubelet-gates", gates)
	}
	contender.Check(cluster(up...))
	defer contender.Finally(func() error { return cluster("down") })
	b := &bench{cluster: name, results: make(map[string]float64)}
	defer b.connect(socket)()
	for _, measure := range []func(context.Context){b.single, b.twenty, b.sixty, b.idle, b.job} {
		measure(ctx)
		time.Sleep(2 * time.Second) // what the last one left to do
	}
	return b.results
}

// What is measured, in the order of the table.
const (
	rowSingle  = "one pod, apply to Ready, p50 of 15, ms"
	rowTwenty  = "20 pods together, all Ready, s"
	rowSixty   = "60 pods together, all Ready, s"
	rowIdle    = "CPU of the runtime in an idle minute with 60 pods, s"
	rowMemory  = "memory of the runtime with 60 pods, MiB"
	rowJob     = "Job of 200 short pods, 40 at a time, s"
	rowJobMem  = "memory after the Job, its pods not deleted, MiB"
	rowJobFD   = "descriptors after the Job"
	rowBefore  = "memory before the Job, MiB"
	rowFDFirst = "descriptors before the Job"
)

var rows = []string{rowSingle, rowTwenty, rowSixty, rowIdle, rowMemory, rowBefore, rowFDFirst, rowJob, rowJobMem, rowJobFD}

const (
	namespace = "bench"
	podsPath  = "http://localhost/api/v1/namespaces/" + namespace + "/pods"
)

type object = map[string]any

// bench measures a cluster, whose API server it reaches by kubectl proxy.
type bench struct {
	cluster string
	client  http.Client
	results map[string]float64
}

// command is kubectl in the namespace.
func (b *bench) command(arguments ...string) *exec.Cmd {
	dir := filepath.Join("/var/lib/minicri-cluster", b.cluster)
	arguments = append([]string{"--kubeconfig", dir + "/kubeconfig", "--namespace", namespace}, arguments...)
	return exec.Command(dir+"/nodes/node1/bin/kubectl", arguments...)
}

func (b *bench) kubectl(input []byte, arguments ...string) {
	command := b.command(arguments...)
	command.Stdin = bytes.NewReader(input)
	if out, err := command.CombinedOutput(); err != nil {
		contender.Check(fmt.Errorf("kubectl %v: %w: %s", arguments, err, out))
	}
}

// connect makes the namespace. A pod needs its service account, which comes some moments later.
func (b *bench) connect(socket string) (end func()) {
	b.kubectl(nil, "create", "namespace", namespace)
	b.kubectl(nil, "wait", "--for=create", "serviceaccount/default", "--timeout=1m")
	proxy := b.command("proxy", "--unix-socket", socket)
	contender.Check(proxy.Start())
	b.client.Transport = &http.Transport{DialContext: func(ctx context.Context, _, _ string) (conn net.Conn, err error) {
		for range 100 {
			if conn, err = (&net.Dialer{}).DialContext(ctx, "unix", socket); err == nil {
				break
			}
			time.Sleep(100 * time.Millisecond) // it comes to listen
		}
		return conn, err
	}}
	return func() {
		_ = proxy.Process.Kill() // it has nothing to save
		_ = proxy.Wait()
	}
}

func (b *bench) ask(ctx context.Context, method, url string, body any) io.ReadCloser {
	data := contender.Must(json.Marshal(body))
	request := contender.Must(http.NewRequestWithContext(ctx, method, url, bytes.NewReader(data)))
	request.Header.Set("Content-Type", "application/json")
	response := contender.Must(b.client.Do(request))
	if response.StatusCode >= http.StatusBadRequest {
		defer response.Body.Close()
		said, _ := io.ReadAll(response.Body) // the status says enough without
		contender.Check(fmt.Errorf("%s %s: %s: %s", method, url, response.Status, said))
	}
	return response.Body
}

// spec is of a pod that runs a command.
func spec(restart string, command ...string) object {
	return object{
		"terminationGracePeriodSeconds": 0, "automountServiceAccountToken": false, "enableServiceLinks": false, "restartPolicy": restart,
		"containers": []object{{
			"name": "main", "image": "cluster.minicri.test/tools:minicri", "command": command,
			"resources": object{"requests": object{"cpu": "1m"}},
		}},
	}
}

// start makes pods, and returns when the last is Ready, with the time of each from its POST.
func (b *bench) start(ctx context.Context, prefix string, n int) (took []time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	watch := b.ask(ctx, http.MethodGet, podsPath+"?watch=1", nil)
	defer watch.Close()
	begun := make(map[string]time.Time)
	for i := range n {
		name := fmt.Sprintf("%s-%d", prefix, i)
		begun[name] = time.Now()
		pod := object{"apiVersion": "v1", "kind": "Pod", "metadata": object{"name": name}, "spec": spec("Always", "sleep", "100000")}
		b.ask(ctx, http.MethodPost, podsPath, pod).Close()
	}
	for events := json.NewDecoder(watch); len(begun) > 0; {
		var event struct {
			Object struct {
				Metadata struct{ Name string }
				Status   struct {
					Conditions []struct{ Type, Status string }
				}
			}
		}
		contender.Check(events.Decode(&event))
		name := event.Object.Metadata.Name
		for _, c := range event.Object.Status.Conditions {
			if since, waited := begun[name]; waited && c.Type == "Ready" && c.Status == "True" {
				took = append(took, time.Since(since))
				delete(begun, name)
			}
		}
	}
	return took
}

func (b *bench) deletePods() { b.kubectl(nil, "delete", "pods", "--all", "--timeout=5m") }

func (b *bench) single(ctx context.Context) {
	var took []time.Duration
	for i := range 15 {
		took = append(took, b.start(ctx, fmt.Sprintf("single-%d", i), 1)...)
	}
	b.results[rowSingle] = contender.Milliseconds(contender.Quantile(took, 0.5))
	b.deletePods()
}

func (b *bench) twenty(ctx context.Context) {
	begun := time.Now()
	b.start(ctx, "many", 20)
	b.results[rowTwenty] = time.Since(begun).Seconds()
	b.deletePods()
}

// sixty leaves its pods to idle.
func (b *bench) sixty(ctx context.Context) {
	begun := time.Now()
	b.start(ctx, "many", 60)
	b.results[rowSixty] = time.Since(begun).Seconds()
}

func (b *bench) idle(context.Context) {
	time.Sleep(10 * time.Second) // the starts have to end first
	before := usageOf(b.cluster)
	time.Sleep(time.Minute)
	after := usageOf(b.cluster)
	b.results[rowIdle], b.results[rowMemory] = (after.cpu - before.cpu).Seconds(), after.mebibytes
	b.deletePods()
}

func (b *bench) job(context.Context) {
	time.Sleep(5 * time.Second)
	before := usageOf(b.cluster)
	begun := time.Now()
	b.kubectl(contender.Must(json.Marshal(object{
		"apiVersion": "batch/v1", "kind": "Job", "metadata": object{"name": "short"},
		"spec": object{"completions": 200, "parallelism": 40, "template": object{"spec": spec("Never", "true")}},
	})), "create", "-f", "-")
	b.kubectl(nil, "wait", "--for=condition=complete", "job/short", "--timeout=10m")
	b.results[rowJob] = time.Since(begun).Seconds()
	time.Sleep(10 * time.Second)
	after := usageOf(b.cluster)
	b.results[rowBefore], b.results[rowFDFirst] = before.mebibytes, before.descriptors
	b.results[rowJobMem], b.results[rowJobFD] = after.mebibytes, after.descriptors
}

// usage is of all processes of a runtime: daemon and shims. What holds a pod's namespaces,
// pause, is not counted for either.
type usage struct {
	cpu                    time.Duration
	mebibytes, descriptors float64 // memory that the node cannot take back
}

// isShim are the programs of runtimes by the names of their files.
var isShim = map[string]bool{"minicri": false, "containerd": false, "minicri-shim": true, "containerd-shim-runc-v2": true}

// usageOf finds a cluster's by the cgroups of its node: what the runtime starts is in there, wherever its parent is.
func usageOf(cluster string) (u usage) {
	pids := contender.Must(contender.Must(cgroup.FindHierarchies()).Processes("/minicri-cluster-" + cluster))
	found := map[bool]bool{}
	for _, pid := range pids {
		proc := fmt.Sprintf("/proc/%d/", pid)
		program, _ := os.Readlink(proc + "exe") // one that has ended has none; of one in memory it is that memory's (memfd_create(2))
		shim, ours := isShim[strings.TrimPrefix(filepath.Base(strings.TrimSuffix(program, " (deleted)")), "memfd:")]
		if !ours {
			continue
		}
		found[shim] = true
		open, _ := os.ReadDir(proc + "fd")
		u.cpu += contender.CPU(pid, false)
		u.mebibytes += float64(contender.Memory(pid)) / 1024
		u.descriptors += float64(len(open))
	}
	// Each cluster has pods of its own: a runtime of which one kind is not found is not measured.
	if len(found) != 2 {
		contender.Check(fmt.Errorf("cluster %s: a daemon and a shim have to be among its %d processes: %v", cluster, len(pids), found))
	}
	return u
}
