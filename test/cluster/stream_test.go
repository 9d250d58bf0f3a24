package cluster

import (
	"bytes"
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

// kubectl's exec, cp, attach and port-forward, through API server and kubelet.
func TestStreams(t *testing.T) {
	s := newSpace(t)
	s.run("pod", "exec agnhost netexec --http-port=8080", "---\nreadinessProbe: {httpGet: {path: /, port: 8080}, periodSeconds: 1}")
	s.run("reader", "while read line; do echo got $line; done; echo end", "restartPolicy: Never,---\nstdin: true, stdinOnce: true")
	s.ready("pod")
	s.ready("reader")
	command := s.command(harness.Limited(t, limit), "exec", "-i", "pod", "--", "sh", "-c", "cat; echo error >&2; exit 42")
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

	command = s.command(harness.Limited(t, limit), "attach", "-i", "reader")
	command.Stdin = strings.NewReader("one\ntwo\n")
	out, err := command.Output()
	harness.Check(t, err)
	contains(t, "attach", string(out), "got two\n")
	s.ended("reader", 0)
	same(t, "log", s.kubectl("logs", "reader"), "got one\ngot two\nend\n")

	command = s.command(harness.Limited(t, limit), "port-forward", "pod/pod", ":8080")
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
