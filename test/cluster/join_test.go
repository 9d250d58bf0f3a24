package cluster

import (
	"errors"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

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
	s.run("far", "exec agnhost netexec --http-port=8080", "nodeName: node9\n---\nreadinessProbe: {httpGet: {path: /, port: 8080}, periodSeconds: 1}\n")
	s.run("near", "sleep 1000", "nodeName: node2\n")
	s.ready("near")
	address := s.ready("far").Status.PodIP
	same(t, "a pod of the new node, asked from another", s.sh("near", "wget -qO- http://"+address+":8080/hostname"), "far")
	contains(t, "the node's end", onCluster(t, "node", "remove", "node9"), "no leak")
	removed = true
	if _, err := read[corev1.Node]("/api/v1/nodes/node9"); !errors.Is(err, errNotFound) {
		t.Errorf("the node after its removal: %v", err)
	}
}
