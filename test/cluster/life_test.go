package cluster

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

func status(pod *corev1.Pod, name string) corev1.ContainerStatus {
	for _, list := range [][]corev1.ContainerStatus{pod.Status.ContainerStatuses, pod.Status.InitContainerStatuses, pod.Status.EphemeralContainerStatuses} {
		for _, c := range list {
			if c.Name == name {
				return c
			}
		}
	}
	return corev1.ContainerStatus{}
}

func TestInitContainersAndSidecar(t *testing.T) {
	s := newSpace(t)
	s.run("pod", "cat /shared/log; wget -qO- http://127.0.0.1:9000/page", `
restartPolicy: Never
volumes: [{name: shared, emptyDir: {}}]
initContainers:
- {name: first, image: IMAGE, command: [sh, -c, "echo first >>/shared/log"], volumeMounts: [{name: shared, mountPath: /shared}]}
- name: sidecar
  image: IMAGE
  restartPolicy: Always
  command: [sh, -c, "mkdir /www && echo from the sidecar >/www/page && httpd -f -p 9000 -h /www"]
  startupProbe: {tcpSocket: {port: 9000}, periodSeconds: 1, failureThreshold: 60}
- {name: second, image: IMAGE, command: [sh, -c, "echo second >>/shared/log"], volumeMounts: [{name: shared, mountPath: /shared}]}
---
volumeMounts: [{name: shared, mountPath: /shared}]
`)
	pod := s.ended("pod", corev1.PodSucceeded)
	same(t, "log", s.kubectl("logs", "pod", "-c", "main"), "first\nsecond\nfrom the sidecar\n")
	if end := status(pod, "sidecar").State.Terminated; end == nil {
		t.Errorf("the sidecar runs on in a pod that has ended: %v", status(pod, "sidecar"))
	}
}

func TestCrashLoopKeepsTheAddress(t *testing.T) {
	s := newSpace(t)
	s.run("crash", "echo try; sleep 1; exit 7", "")
	var address string
	pod := s.await("crash", "was started three times and is in CrashLoopBackOff", func(pod *corev1.Pod) bool {
		if ip := pod.Status.PodIP; ip != "" {
			if address == "" {
				address = ip
			}
			same(t, "address", ip, address)
		}
		c := status(pod, "main")
		return c.RestartCount >= 2 && c.State.Waiting != nil && c.State.Waiting.Reason == "CrashLoopBackOff"
	})
	if last := status(pod, "main").LastTerminationState.Terminated; last == nil || last.ExitCode != 7 || last.Reason != "Error" {
		t.Errorf("last state: %v", last)
	}
	same(t, "previous log", s.kubectl("logs", "--previous", "crash"), "try\n")
}

func TestProbes(t *testing.T) {
	s := newSpace(t)
	kinds := map[string]string{
		"exec": "{exec: {command: [cat, /tmp/ready]}", "http": "{httpGet: {path: /, port: 8080}",
		"tcp": "{tcpSocket: {port: 8080}", "grpc": "{grpc: {port: 5000}",
	}
	script := map[string]string{
		"exec": "sleep 2; touch /tmp/ready; sleep 1000", "http": "exec agnhost netexec --http-port=8080",
		"tcp": "exec agnhost netexec --http-port=8080", "grpc": "exec agnhost grpc-health-checking",
	}
	for kind, probe := range kinds {
		s.run(kind, script[kind], "---\nreadinessProbe: "+probe+", periodSeconds: 1}\nstartupProbe: "+probe+", periodSeconds: 1, failureThreshold: 60}\n")
		s.run("live-"+kind, "sleep 1000", "---\nlivenessProbe: "+probe+", periodSeconds: 1, failureThreshold: 1}\n")
	}
	for kind := range kinds {
		pod := s.ready(kind)
		same(t, kind+": restarts", status(pod, "main").RestartCount, 0)
		s.await("live-"+kind, "is restarted by its liveness probe", func(pod *corev1.Pod) bool { return status(pod, "main").RestartCount > 0 })
	}
}

func TestHooksAndGracefulTermination(t *testing.T) {
	s := newSpace(t)
	s.apply(strings.ReplaceAll(`
apiVersion: v1
kind: Pod
metadata: {name: hooks}
spec:
  nodeName: node2
  terminationGracePeriodSeconds: 60
  volumes: [{name: node, hostPath: {path: /tmp/SPACE, type: DirectoryOrCreate}}]
  containers:
  - name: main
    image: IMAGE
    command: [sh, -c, "trap 'sleep 2; echo TERM >>/node/log; exit 0' TERM; while :; do sleep 0.1; done"]
    volumeMounts: [{name: node, mountPath: /node}]
    lifecycle:
      postStart: {exec: {command: [sh, -c, "echo postStart >>/node/log"]}}
      preStop: {exec: {command: [sh, -c, "echo preStop >>/node/log"]}}
`, "SPACE", s.name))
	t.Cleanup(func() { onNode(t, node2, "rm -r /tmp/"+s.name) })
	s.ready("hooks")
	begun := time.Now()
	s.kubectl("delete", "pod", "hooks")
	if took := time.Since(begun); took < 2*time.Second {
		t.Errorf("the pod was gone after %v, its process needs 2 s", took)
	}
	same(t, "what happened", onNode(t, node2, "cat /tmp/"+s.name+"/log"), "postStart\npreStop\nTERM\n")
}

func TestProcessThatIgnoresTermination(t *testing.T) {
	s := newSpace(t)
	s.run("deaf", "trap '' TERM; while :; do sleep 0.1; done", "")
	s.ready("deaf")
	begun := time.Now()
	s.kubectl("delete", "pod", "deaf", "--grace-period=3")
	if took := time.Since(begun); took < 3*time.Second || took > time.Minute {
		t.Errorf("the pod was gone after %v, its grace period is 3 s", took)
	}
}

func TestOOMKilled(t *testing.T) {
	s := newSpace(t)
	s.run("hungry", "head -c 200m /dev/zero | tail", "restartPolicy: Never\n---\nresources: {limits: {memory: 30Mi}}\n")
	pod := s.ended("hungry", corev1.PodFailed)
	if end := status(pod, "main").State.Terminated; end == nil || end.Reason != "OOMKilled" || end.ExitCode != 137 {
		t.Errorf("it ended %v", end)
	}
}

func TestEphemeralContainer(t *testing.T) {
	s := newSpace(t)
	s.run("target", "exec sleep 1234", "")
	s.ready("target")
	s.kubectl("debug", "target", "--image="+image, "--target=main", "--container=debugger", "--", "sh", "-c", "ps | grep -c 'slee[p] 1234'; sleep 1000")
	s.await("target", "its ephemeral container runs", func(pod *corev1.Pod) bool { return status(pod, "debugger").State.Running != nil })
	eventually(t, "the ephemeral container sees the process of its target", func() bool {
		return s.kubectl("logs", "target", "-c", "debugger") == "1\n"
	})
}

func TestStaticPod(t *testing.T) {
	s := newSpace(t)
	manifest := strings.NewReplacer("SPACE", s.name, "IMAGE", image).Replace(`
apiVersion: v1
kind: Pod
metadata: {name: static, namespace: SPACE}
spec:
  terminationGracePeriodSeconds: 0
  containers: [{name: main, image: IMAGE, command: [sh, -c, "echo static; sleep 1000"]}]
`)
	onClusterIn(t, manifest, "exec", node2, "sh", "-c", "cat >/etc/kubernetes/manifests/static.yaml")
	t.Cleanup(func() { onNode(t, node2, "rm -f /etc/kubernetes/manifests/static.yaml") })
	s.ready("static-" + node2)
	same(t, "log", s.kubectl("logs", "static-"+node2), "static\n")
	onNode(t, node2, "rm /etc/kubernetes/manifests/static.yaml")
	eventually(t, "the mirror pod is gone", func() bool { return s.pod("static-"+node2).Name == "" })
}
