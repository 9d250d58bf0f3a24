package validate

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/oci"
)

// checkSysctl reports why a kernel parameter cannot be set for this pod: it
// would be set for the whole node, or it belongs to a namespace that the pod
// shares with the node.
func checkSysctl(config *runtimeapi.PodSandboxConfig, name string) error {
	dotted := oci.SysctlName(name)
	switch {
	case strings.ContainsAny(dotted, "\x00 ") || slices.ContainsFunc(strings.Split(dotted, "."), isNoElement):
		return errors.New("not a name of a kernel parameter")
	case strings.HasPrefix(dotted, "net."):
		if oci.HostNetwork(config) {
			return errors.New("the pod shares the network namespace with the node")
		}
	case strings.HasPrefix(dotted, "fs.mqueue.") || isIPC(dotted):
		if config.GetLinux().GetSecurityContext().GetNamespaceOptions().GetIpc() == runtimeapi.NamespaceMode_NODE {
			return errors.New("the pod shares the IPC namespace with the node")
		}
	default:
		return fmt.Errorf("%s is not a parameter of a namespace, it would change the node", dotted)
	}
	return nil
}

// isNoElement: an element with dots alone (here slashes, see oci.SysctlName) would
// lead out of the directory of the namespace's parameters.
func isNoElement(element string) bool { return strings.Trim(element, "/") == "" }

// isIPC: the kernel parameters of the IPC namespace (ipc_namespaces(7)).
func isIPC(name string) bool {
	switch name {
	case "kernel.msgmax", "kernel.msgmnb", "kernel.msgmni", "kernel.sem",
		"kernel.shmall", "kernel.shmmax", "kernel.shmmni", "kernel.shm_rmid_forced":
		return true
	}
	return false
}
