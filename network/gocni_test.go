package network

import (
	"testing"

	gocni "github.com/containerd/go-cni"
	"github.com/containernetworking/cni/libcni"

	"github.com/minicri/minicri/test/harness"
)

// A go-cni that keeps its libcni elsewhere fails here, with an update of the module, and not on nodes.
func TestGoCNIKeepsItsLibcni(t *testing.T) {
	cni, err := gocni.New()
	must(t, err)
	harness.Check(t, throughExec(cni, libcni.NewCNIConfig(nil, nil)))
}
