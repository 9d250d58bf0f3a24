package e2e

import (
	"os"
	"testing"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

const (
	modePod       = runtimeapi.NamespaceMode_POD
	modeContainer = runtimeapi.NamespaceMode_CONTAINER
	modeNode      = runtimeapi.NamespaceMode_NODE
)

func modes(network, pid, ipc runtimeapi.NamespaceMode) harness.PodOption {
	return func(c *runtimeapi.PodSandboxConfig) {
		c.Linux.SecurityContext.NamespaceOptions = &runtimeapi.NamespaceOption{Network: network, Pid: pid, Ipc: ipc}
		if network == modeNode {
			c.Hostname = "" // it has that of the node
		}
	}
}

// Each kind of namespace is the pod's own or the node's, as was asked for, and
// status tells the kubelet so.
//
// cri: LinuxPodSandboxStatus.namespaces Namespace.options PodSandboxStatus.linux
func TestNamespaceModes(t *testing.T) {
	n := newNode(t)
	node := os.Getpid()
	var nodeNet string
	n.RunInNetns(func() (err error) {
		nodeNet, err = os.Readlink("/proc/thread-self/ns/net")
		return err
	})
	own := make(map[string]bool) // namespaces of pods
	for name, mode := range map[string][3]runtimeapi.NamespaceMode{
		"all-own":       {modePod, modePod, modePod},
		"container-pid": {modePod, modeContainer, modePod},
		"node-network":  {modeNode, modeContainer, modePod},
		"node-pid":      {modePod, modeNode, modePod},
		"node-ipc":      {modePod, modePod, modeNode},
		"all-node":      {modeNode, modeNode, modeNode},
	} {
		config := n.PodConfig(name, modes(mode[0], mode[1], mode[2]))
		id := n.RunPod(config)
		pid := pausePID(t, n, id)
		shared := map[string]bool{
			"net": namespace(t, pid, "net") == nodeNet,
			"uts": namespace(t, pid, "uts") == namespace(t, node, "uts"),
			"pid": namespace(t, pid, "pid") == namespace(t, node, "pid"),
			"ipc": namespace(t, pid, "ipc") == namespace(t, node, "ipc"),
		}
		want := map[string]bool{"net": mode[0] == modeNode, "uts": mode[0] == modeNode, "pid": mode[1] == modeNode, "ipc": mode[2] == modeNode}
		for kind := range want {
			if shared[kind] != want[kind] {
				t.Errorf("%s: %s: shared with the node is %v, want %v", name, kind, shared[kind], want[kind])
			}
		}
		for _, kind := range []string{"net", "uts", "pid", "ipc", "mnt"} {
			of := namespace(t, pid, kind)
			if own[of] {
				t.Errorf("%s: it shares %s with another pod", name, of)
			}
			own[of] = !shared[kind]
		}
		if namespace(t, pid, "mnt") == namespace(t, node, "mnt") {
			t.Errorf("%s: pause is in the node's mount namespace", name)
		}
		echoed := podStatus(t, n, id).Linux.GetNamespaces().GetOptions()
		if !proto.Equal(echoed, config.Linux.SecurityContext.NamespaceOptions) {
			t.Errorf("%s: status has %v", name, echoed)
		}
	}
}

func TestPodWithoutSecurityContext(t *testing.T) {
	n := newNode(t)
	config := n.PodConfig("bare")
	config.Linux = nil
	status := podStatus(t, n, n.RunPod(config))
	if options := status.Linux.GetNamespaces().GetOptions(); options.GetNetwork() != modePod || status.Network.Ip == "" {
		t.Errorf("got %v", status)
	}
}
