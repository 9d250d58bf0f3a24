package validate

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/oci"
)

// checkSysctl reports why a kernel parameter cannot be set for this pod: it
// would be set for the whole node, or it belongs to a namespace that the pod
// shares with the node.
func checkSysctl(config *runtimeapi.PodSandboxConfig, name string) error {
	dotted := oci.SysctlName(name)
	if strings.ContainsAny(dotted, "\x00 ") || slices.ContainsFunc(strings.Split(dotted, "."), isNoElement) {
		return errors.New("not a name of a kernel parameter")
	}
	switch kind := oci.SysctlNamespace(name); {
	case kind == "":
		return fmt.Errorf("%s is not a parameter of a namespace, it would change the node", dotted)
	case oci.OwnsSysctl(config, name):
		return nil
	case kind == specs.NetworkNamespace:
		return errors.New("the pod shares the network namespace with the node")
	default:
		return errors.New("the pod shares the IPC namespace with the node")
	}
}

// isNoElement: an element with dots alone (here slashes, see oci.SysctlName) would
// lead out of the directory of the namespace's parameters.
func isNoElement(element string) bool { return strings.Trim(element, "/") == "" }
