// Package cluster asks minicri for what users of Kubernetes ask: each test is a
// case on two nodes that hack/cluster made, through the API server and kubectl.
//
// `make test-cluster` makes the cluster, runs the tests and takes it down, which looks for leaks. Each test has a
// namespace of its own. Those that end a runtime, a kubelet or a node are marked serial and come after the others.
package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
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

// onNode runs a shell in a node.
func onNode(t testing.TB, node, script string) string {
	return onCluster(t, "exec", node, "sh", "-c", script)
}

// kubectl's exec, cp, attach and port-forward, through API server and kubelet.
func TestStreams(t *testing.T) {
	s := newSpace(t)
	s.run("pod", "exec agnhost netexec --http-port=8080", "---\nreadinessProbe: {httpGet: {path: /, port: 8080}, periodSeconds: 1}")
	s.run("reader", "while read line; do echo got $line; done; echo end", "restartPolicy: Never,---\nstdin: true, stdinOnce: true")
	s.ready("pod")
	s.ready("reader")
	command := s.command(harness.Limited(t), "exec", "-i", "pod", "--", "sh", "-c", "cat; echo error >&2; exit 42")
	var stdout, stderr bytes.Buffer
	command.Stdin, command.Stdout, command.Stderr = strings.NewReader("input\n"), &stdout, &stderr
	err := command.Run()
	var exit *exec.ExitError
	harness.Want(t, errors.As(err, &exit) && exit.ExitCode() == 42, "exit code: %v, want 42", err)
	same(t, "stdout", stdout.String(), "input\n")
	contains(t, "stderr", stderr.String(), "error\n")

	file, back := filepath.Join(t.TempDir(), "file"), filepath.Join(t.TempDir(), "back")
	content := bytes.Repeat([]byte("0123456789abcdef"), 1<<19)
	harness.Check(t, os.WriteFile(file, content, 0o600))
	s.kubectl("cp", file, "pod:/tmp/file")
	s.kubectl("cp", "pod:/tmp/file", back)
	copied, err := os.ReadFile(back)
	harness.Want(t, err == nil && bytes.Equal(copied, content), "%d bytes came back, of %d, or others (%v)", len(copied), len(content), err)

	command = s.command(harness.Limited(t), "attach", "-i", "reader")
	command.Stdin = strings.NewReader("one\ntwo\n")
	out, err := command.Output()
	harness.Check(t, err)
	contains(t, "attach", string(out), "got two\n")
	s.ended("reader", 0)
	same(t, "log", s.kubectl("logs", "reader"), "got one\ngot two\nend\n")

	command = s.command(harness.Limited(t), "port-forward", "pod/pod", ":8080")
	forwards, err := command.StdoutPipe()
	harness.Check(t, err)
	harness.Check(t, command.Start())
	defer command.Wait()
	defer command.Process.Kill()
	var port int
	_, err = fmt.Fscanf(forwards, "Forwarding from 127.0.0.1:%d", &port)
	harness.Check(t, err)
	for range 3 {
		response, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/hostname", port))
		harness.Check(t, err)
		body, err := io.ReadAll(response.Body)
		response.Body.Close()
		harness.Check(t, err)
		same(t, "page", string(body), "pod")
	}
}

func TestLogRotation(t *testing.T) {
	s := newSpace(t)
	// The kubelet rotates at 10 MiB and looks every 10 s.
	s.run("pod", "head -c 12000000 /dev/zero | tr '\\0' x | fold -w 999; sleep 15; echo; echo after; sleep 1000", "")
	pod := s.ready("pod")
	directory := "/var/log/pods/" + s.name + "_pod_" + string(pod.UID) + "/main"
	s.eventually("a rotated file is there", func() bool {
		return strings.Contains(onNode(t, pod.Spec.NodeName, "ls "+directory), "0.log.")
	})
	s.eventually("what is written later is in the new file", func() bool { return s.kubectl("logs", "--tail=1", "pod") == "after\n" })
	same(t, "size of the new file", onNode(t, pod.Spec.NodeName, "cat "+directory+"/0.log | wc -l"), "2\n")
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
