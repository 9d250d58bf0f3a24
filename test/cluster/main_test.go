package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

const (
	image     = "cluster.minicri.test/tools:minicri"
	node1     = "node1"
	node2     = "node2"
	nodeRoot  = "/var/lib/minicri-cluster"
	proxyName = "api.sock"
)

// The cluster of this run.
var (
	clusterName = os.Getenv("CLUSTER")
	clusterTool string
	apiSocket   string
)

func TestMain(m *testing.M) {
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func run(m *testing.M) (code int, err error) {
	if clusterName == "" {
		return 0, errors.New("CLUSTER names no cluster: run make test-cluster, or set it to one that runs")
	}
	if clusterTool, err = filepath.Abs("../../bin/cluster"); err != nil {
		return 0, err
	}
	dir, err := os.MkdirTemp("", "mc")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	apiSocket = filepath.Join(dir, proxyName)
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	proxy := exec.CommandContext(ctx, kubectlPath(), "proxy", "--unix-socket", apiSocket)
	proxy.Env = environment()
	if err := proxy.Start(); err != nil {
		return 0, err
	}
	code = m.Run()
	stop()
	proxy.Wait() // killed by stop
	return code, nil
}

// kubectlPath is kubectl itself: bin/cluster kubectl would be its parent, and
// take a signal for it.
func kubectlPath() string {
	return filepath.Join(nodeRoot, clusterName, "nodes", node1, "bin/kubectl")
}

func environment() []string {
	return append(os.Environ(), "KUBECONFIG="+filepath.Join(nodeRoot, clusterName, "kubeconfig"))
}

// onCluster runs bin/cluster.
func onCluster(t testing.TB, arguments ...string) string {
	t.Helper()
	return onClusterIn(t, "", arguments...)
}

func onClusterIn(t testing.TB, input string, arguments ...string) string {
	t.Helper()
	command := exec.CommandContext(limited(t), clusterTool, append([]string{"--name", clusterName}, arguments...)...)
	command.Stdin = strings.NewReader(input)
	out, err := command.CombinedOutput()
	if err != nil {
		t.Fatalf("cluster %s: %v\n%s", strings.Join(arguments, " "), err, out)
	}
	return string(out)
}

// onNode runs a shell in a node.
func onNode(t testing.TB, node, script string) string {
	t.Helper()
	return onCluster(t, "exec", node, "sh", "-c", script)
}
