package cluster

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/minicri/minicri/test/harness"
)

// many is a Deployment of N pods on node2 that log a line each 100 ms.
const many = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: many}
spec:
  replicas: N
  selector: {matchLabels: {app: many}}
  template:
    metadata: {labels: {app: many}}
    spec:
      nodeSelector: {kubernetes.io/hostname: node2}
      terminationGracePeriodSeconds: 0
      containers: [{name: main, image: IMAGE, command: [sh, -c, "i=0; while :; do i=$((i+1)); echo $i; sleep 0.5; done"], resources: {requests: {cpu: 1m}}}]
`

// life is what must not change of a pod that keeps running.
type life struct {
	uid, address, container, started string
	restarts                         int32
}

func (s *space) lives(app string) map[string]life {
	lives := make(map[string]life)
	for _, pod := range s.pods(app) {
		c := status(&pod)
		l := life{uid: string(pod.UID), address: pod.Status.PodIP, container: c.ContainerID, restarts: c.RestartCount}
		if c.State.Running != nil {
			l.started = c.State.Running.StartedAt.String()
		}
		lives[pod.Name] = l
	}
	return lives
}

func (s *space) startMany(n int) map[string]life {
	s.apply(strings.Replace(many, "N", fmt.Sprint(n), 1))
	s.kubectl("rollout", "status", "deployment/many", "--timeout=4m")
	lives := s.lives("many")
	same(s.t, "pods", len(lives), n)
	return lives
}

// checkLives compares the pods of now with those of before, and the lines of some
// logs with the numbers that were written.
func (s *space) checkLives(before map[string]life) {
	s.t.Helper()
	after := s.lives("many")
	for name, was := range before {
		harness.Want(s.t, after[name] == was, "pod %s was %+v, and is %+v", name, was, after[name])
	}
	same(s.t, "pods", len(after), len(before))
	for name := range before {
		for i, line := range strings.Fields(s.kubectl("logs", name)) {
			if line != fmt.Sprint(i+1) {
				s.t.Errorf("line %d of the log of %s is %q", i+1, name, line)
				break
			}
		}
	}
}

// checkNodeMakesPods waits until the node is Ready and makes a pod.
func (s *space) checkNodeMakesPods(name string) {
	s.run(name, "sleep 1000", "nodeName: node2,")
	s.ready(name)
	s.kubectl("delete", "pod", name)
}

func TestUpgradeUnderPods(t *testing.T) {
	s := serialSpace(t)
	before := s.startMany(60)
	const ends = 12 // pods, the k-th after k seconds with the exit code k
	for k := range ends {
		s.run(fmt.Sprint("ends-", k), fmt.Sprintf("sleep %d; exit %d", k, k), "nodeName: node2, restartPolicy: Never,")
	}
	// Another file with the same program: what runs keeps the old one.
	directory := t.TempDir()
	for _, name := range []string{"minicri", "minicri-shim"} {
		data := harness.Read(t, filepath.Join("../../bin", name))
		harness.Check(t, os.WriteFile(filepath.Join(directory, name), data, 0o755))
	}
	onCluster(t, "upgrade-runtime", directory)
	for k := range ends {
		s.ended(fmt.Sprint("ends-", k), int32(k))
	}
	s.checkNodeMakesPods("new")
	s.checkLives(before)
	for name := range before {
		same(t, "exec in a pod of before", s.sh(name, "echo still"), "still\n")
		break
	}
}

func TestNodeReboot(t *testing.T) {
	s := serialSpace(t)
	before := s.startMany(10)
	begun := time.Now()
	onCluster(t, "node", "reboot", node2)
	s.eventually("every pod runs again, restarted once", func() bool {
		after := s.lives("many")
		if len(after) != len(before) {
			return false
		}
		for name, was := range before {
			is := after[name]
			if is.uid != was.uid || is.restarts != 1 || is.started == "" || is.container == was.container {
				return false
			}
		}
		return true
	})
	t.Logf("10 pods ran again %v after the power cut", time.Since(begun).Round(time.Second))
	addresses := make(map[string]string)
	for name, l := range s.lives("many") {
		other, taken := addresses[l.address]
		harness.Want(t, !taken, "%s and %s have the address %s", name, other, l.address)
		addresses[l.address] = name
	}
	s.checkNodeMakesPods("new")
}

// TestNodeJoinsAndLeaves is serial for the memory that a third node needs.
func TestNodeJoinsAndLeaves(t *testing.T) {
	s := serialSpace(t)
	onCluster(t, "node", "add", "node9")
	removed := false
	t.Cleanup(func() {
		if !removed {
			onCluster(t, "node", "remove", "node9")
		}
	})
	s.run("far", "exec agnhost netexec --http-port=8080", "nodeName: node9,---\nreadinessProbe: {httpGet: {path: /, port: 8080}, periodSeconds: 1}")
	s.run("near", "sleep 1000", "nodeName: node2,")
	s.ready("near")
	address := s.ready("far").Status.PodIP
	same(t, "a pod of the new node, asked from another", s.sh("near", "wget -qO- http://"+address+":8080/hostname"), "far")
	contains(t, "the node's end", onCluster(t, "node", "remove", "node9"), "no leak")
	removed = true
	_, err := read[corev1.Node]("/api/v1/nodes/node9")
	harness.Want(t, errors.Is(err, errNotFound), "the node after its removal: %v", err)
}
