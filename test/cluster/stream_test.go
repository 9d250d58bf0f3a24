package cluster

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

func TestExec(t *testing.T) {
	s := newSpace(t)
	s.run("pod", "sleep 1000", "")
	s.ready("pod")
	command := s.command(limited(t), "exec", "-i", "pod", "--", "sh", "-c", "cat; echo error >&2; exit 42")
	var stdout, stderr bytes.Buffer
	command.Stdin, command.Stdout, command.Stderr = strings.NewReader("input\n"), &stdout, &stderr
	err := command.Run()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 42 {
		t.Errorf("exit code: %v, want 42", err)
	}
	same(t, "stdout", stdout.String(), "input\n")
	contains(t, "stderr", stderr.String(), "error\n")
	const size = 8 << 20
	out := s.kubectl("exec", "pod", "--", "head", "-c", fmt.Sprint(size), "/dev/zero")
	same(t, "bytes of output", len(out), size)
}

func TestCopy(t *testing.T) {
	s := newSpace(t)
	s.run("pod", "sleep 1000", "")
	s.ready("pod")
	dir := t.TempDir()
	content := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	if err := os.WriteFile(filepath.Join(dir, "file"), content, 0o600); err != nil {
		t.Fatal(err)
	}
	s.kubectl("cp", filepath.Join(dir, "file"), "pod:/tmp/file")
	s.kubectl("cp", "pod:/tmp/file", filepath.Join(dir, "back"))
	back, err := os.ReadFile(filepath.Join(dir, "back"))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(back, content) {
		t.Errorf("%d bytes came back, of %d, or others", len(back), len(content))
	}
}

func TestAttach(t *testing.T) {
	s := newSpace(t)
	s.run("pod", "while read line; do echo got $line; done; echo end", "restartPolicy: Never\n---\nstdin: true\nstdinOnce: true\n")
	s.ready("pod")
	command := s.command(limited(t), "attach", "-i", "pod")
	command.Stdin = strings.NewReader("one\ntwo\n")
	out, err := command.Output()
	if err != nil {
		t.Errorf("attach: %v", err)
	}
	contains(t, "attach", string(out), "got two\n")
	s.ended("pod", corev1.PodSucceeded)
	same(t, "log", s.kubectl("logs", "pod"), "got one\ngot two\nend\n")
}

func TestLogs(t *testing.T) {
	s := newSpace(t)
	s.run("pod", "for i in $(seq 50); do echo line $i; sleep 0.1; done; printf end", "restartPolicy: Never\n")
	s.await("pod", "has started", func(pod *corev1.Pod) bool { return pod.Status.Phase != corev1.PodPending })
	followed := s.kubectl("logs", "-f", "pod")
	var want strings.Builder
	for i := range 50 {
		fmt.Fprintf(&want, "line %d\n", i+1)
	}
	same(t, "followed log", followed, want.String()+"end")
	same(t, "tail", s.kubectl("logs", "--tail=2", "pod"), "line 50\nend")
	same(t, "limit", s.kubectl("logs", "--limit-bytes=6", "pod"), "line 1")
}

func TestLogRotation(t *testing.T) {
	s := newSpace(t)
	// The kubelet rotates at 10 MiB and looks every 10 s.
	s.run("pod", "head -c 12000000 /dev/zero | tr '\\0' x | fold -w 999; sleep 15; echo; echo after; sleep 1000", "")
	pod := s.ready("pod")
	directory := "/var/log/pods/" + s.name + "_pod_" + string(pod.UID) + "/main"
	eventually(t, "a rotated file is there", func() bool {
		return strings.Contains(onNode(t, pod.Spec.NodeName, "ls "+directory), "0.log.")
	})
	eventually(t, "what is written later is in the new file", func() bool { return s.kubectl("logs", "--tail=1", "pod") == "after\n" })
	same(t, "size of the new file", onNode(t, pod.Spec.NodeName, "cat "+directory+"/0.log | wc -l"), "2\n")
}

func TestPortForward(t *testing.T) {
	s := newSpace(t)
	s.run("pod", "exec agnhost netexec --http-port=8080", "---\nreadinessProbe: {httpGet: {path: /, port: 8080}, periodSeconds: 1}\n")
	s.ready("pod")
	command := s.command(limited(t), "port-forward", "pod/pod", ":8080")
	out, err := command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	defer command.Wait()
	defer command.Process.Kill()
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	var port int
	if _, err := fmt.Sscanf(line, "Forwarding from 127.0.0.1:%d", &port); err != nil {
		t.Fatalf("%q: %v", line, err)
	}
	for range 3 {
		response, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/hostname", port))
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(response.Body)
		response.Body.Close()
		same(t, "page", string(body), "pod")
		if err != nil {
			t.Error(err)
		}
	}
}

// summary is the part of the kubelet's statistics that is asserted.
type summary struct {
	Pods []struct {
		PodRef     struct{ Name, Namespace string }
		CPU        struct{ UsageCoreNanoSeconds uint64 }
		Memory     struct{ WorkingSetBytes uint64 }
		Containers []struct{ Name string }
	}
}

func TestStatistics(t *testing.T) {
	s := newSpace(t)
	s.run("pod", "while :; do :; done", "---\nresources: {limits: {cpu: 200m}}\n")
	pod := s.ready("pod")
	var last uint64
	rising := 0
	for deadline := time.Now().Add(limit); rising < 2; time.Sleep(time.Second) {
		if time.Now().After(deadline) {
			t.Fatalf("the pod's CPU time does not rise, it is %d ns", last)
		}
		stats, err := read[summary]("/api/v1/nodes/" + pod.Spec.NodeName + "/proxy/stats/summary")
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range stats.Pods {
			if p.PodRef.Namespace == s.name && p.CPU.UsageCoreNanoSeconds > last && p.Memory.WorkingSetBytes > 0 && len(p.Containers) == 1 {
				last = p.CPU.UsageCoreNanoSeconds
				rising++
			}
		}
	}
	metrics := s.kubectl("get", "--raw", "/api/v1/nodes/"+pod.Spec.NodeName+"/proxy/metrics/resource")
	contains(t, "/metrics/resource", metrics, `container_cpu_usage_seconds_total{container="main",namespace="`+s.name+`",pod="pod"}`)
}

func TestResizeInPlace(t *testing.T) {
	s := newSpace(t)
	s.run("pod", "sleep 1000", "---\nresources: {requests: {cpu: 100m, memory: 50Mi}, limits: {cpu: 200m, memory: 100Mi}}\n")
	before := s.ready("pod")
	s.kubectl("patch", "pod", "pod", "--subresource", "resize", "-p",
		`{"spec":{"containers":[{"name":"main","resources":{"requests":{"cpu":"150m","memory":"60Mi"},"limits":{"cpu":"400m","memory":"150Mi"}}}]}}`)
	const quota = "cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null || cat /sys/fs/cgroup/cpu.max /sys/fs/cgroup/memory.max"
	eventually(t, "the container's cgroup has the new limits", func() bool {
		got := strings.Fields(s.sh("pod", quota))
		return len(got) > 1 && got[0] == "40000" && got[len(got)-1] == fmt.Sprint(150<<20)
	})
	after := s.await("pod", "its status has the new limits", func(pod *corev1.Pod) bool {
		r := status(pod, "main").Resources
		return r != nil && r.Limits.Cpu().String() == "400m"
	})
	same(t, "restarts", status(after, "main").RestartCount, 0)
	same(t, "container", status(after, "main").ContainerID, status(before, "main").ContainerID)
}

// The kubelet sets the limits of the pod's cgroup itself, and tells the runtime.
func TestResizeOfAPod(t *testing.T) {
	s := newSpace(t)
	s.run("pod", "sleep 1000", "nodeName: node2\nresources: {requests: {cpu: 100m, memory: 50Mi}, limits: {cpu: 200m, memory: 100Mi}}\n")
	before := s.ready("pod")
	s.kubectl("patch", "pod", "pod", "--subresource", "resize", "-p",
		`{"spec":{"resources":{"requests":{"cpu":"150m","memory":"60Mi"},"limits":{"cpu":"400m","memory":"150Mi"}}}}`)
	uid := string(before.UID)
	script := "cd /sys/fs/cgroup; for d in $(find . -type d -path '*pod" + uid + "' -o -type d -path '*pod" + strings.ReplaceAll(uid, "-", "_") + ".slice'); do" +
		" cat $d/cpu.cfs_quota_us $d/cpu.max $d/memory.limit_in_bytes $d/memory.max 2>/dev/null; done; true"
	eventually(t, "the pod's cgroup has the new limits", func() bool {
		got := strings.Fields(onNode(t, node2, script))
		return slices.Contains(got, "40000") && slices.Contains(got, fmt.Sprint(150<<20))
	})
	after := s.await("pod", "its resize has ended", func(pod *corev1.Pod) bool {
		for _, c := range pod.Status.Conditions {
			if c.Type == corev1.PodResizePending || c.Type == corev1.PodResizeInProgress {
				return false
			}
		}
		return pod.Status.Resources != nil && pod.Status.Resources.Limits.Cpu().String() == "400m"
	})
	same(t, "restarts", status(after, "main").RestartCount, 0)
	same(t, "container", status(after, "main").ContainerID, status(before, "main").ContainerID)
}

// kubectl top asks metrics-server, which test/cluster/run adds, that the kubelets,
// and these minicri.
func TestTop(t *testing.T) {
	s := newSpace(t)
	s.run("pod", "while :; do :; done", "---\nresources: {limits: {cpu: 200m, memory: 50Mi}}\n")
	s.ready("pod")
	var top string
	eventually(t, "kubectl top knows the pod", func() bool {
		var err error
		top, err = s.try("top", "pod", "pod", "--containers", "--no-headers")
		return err == nil
	})
	fields := strings.Fields(top) // pod, container, CPU, memory
	if len(fields) != 4 || fields[1] != "main" {
		t.Fatalf("kubectl top pod: %q", top)
	}
	cpu, err := strconv.Atoi(strings.TrimSuffix(fields[2], "m"))
	if err != nil || cpu < 1 || cpu > 300 {
		t.Errorf("CPU of a busy loop with the limit of 200m: %s", fields[2])
	}
	nodes := s.kubectl("top", "nodes", "--no-headers")
	contains(t, "kubectl top nodes", nodes, node1)
	contains(t, "kubectl top nodes", nodes, node2)
}
