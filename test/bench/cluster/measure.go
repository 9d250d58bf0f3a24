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
