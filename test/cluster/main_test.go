// Package cluster asks minicri for what users of Kubernetes ask: each test is a
// case on two nodes that hack/cluster made, through the API server and kubectl.
//
// `make test-cluster` makes the cluster, runs the tests and takes it down, which looks for leaks. Each test has a
// namespace of its own. Those that end a runtime, a kubelet or a node are marked serial and come after the others.
package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

const (
	image    = "cluster.minicri.test/tools:minicri"
	node2    = "node2"
	nodeRoot = "/var/lib/minicri-cluster"
	tool     = "../../bin/cluster"
)

// The cluster of this run.
var (
	clusterName = os.Getenv("CLUSTER")
	apiSocket   string
)

func TestMain(m *testing.M) {
	if clusterName == "" {
		fmt.Fprintln(os.Stderr, "CLUSTER names no cluster: run make test-cluster, or set it to one that runs")
		os.Exit(1)
	}
	dir, err := os.MkdirTemp("", "mc")
	apiSocket = filepath.Join(dir, "api.sock")
	proxy := kubectl(context.Background(), "proxy", "--unix-socket", apiSocket)
	if err = errors.Join(err, proxy.Start()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	_, _, _ = proxy.Process.Kill(), proxy.Wait(), os.RemoveAll(dir)
	os.Exit(code)
}

// kubectl is kubectl itself: bin/cluster kubectl would be its parent, and take a signal for it.
func kubectl(ctx context.Context, arguments ...string) *exec.Cmd {
	command := exec.CommandContext(ctx, filepath.Join(nodeRoot, clusterName, "nodes/node1/bin/kubectl"), arguments...)
	command.Env = append(os.Environ(), "KUBECONFIG="+filepath.Join(nodeRoot, clusterName, "kubeconfig"))
	return command
}

// onCluster runs bin/cluster.
func onCluster(t testing.TB, arguments ...string) string {
	out, err := exec.CommandContext(harness.Limited(t), tool, append([]string{"--name", clusterName}, arguments...)...).CombinedOutput()
	harness.Need(t, err == nil, "cluster %s: %v\n%s", strings.Join(arguments, " "), err, out)
	return string(out)
}

// kubectl top asks metrics-server, which test/cluster/run adds, that the kubelets, and these minicri.
func TestTop(t *testing.T) {
	s := newSpace(t)
	s.run("pod", "while :; do :; done", "---\nresources: {limits: {cpu: 200m, memory: 50Mi}}")
	s.ready("pod")
	var top string
	s.eventually("kubectl top knows the pod", func() bool {
		var err error
		top, err = s.try("top", "pod", "pod", "--containers", "--no-headers")
		return err == nil
	})
	fields := strings.Fields(top) // pod, container, CPU, memory
	harness.Need(t, len(fields) == 4 && fields[1] == "main", "kubectl top pod: %q", top)
	cpu, err := strconv.Atoi(strings.TrimSuffix(fields[2], "m"))
	harness.Want(t, err == nil && cpu >= 1 && cpu <= 300, "CPU of a busy loop with the limit of 200m: %s", fields[2])
	nodes := s.kubectl("top", "nodes", "--no-headers")
	contains(t, "kubectl top nodes", nodes, "node1")
	contains(t, "kubectl top nodes", nodes, node2)
}
