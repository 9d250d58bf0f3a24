package oci_test

import (
	"fmt"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/oci"
	"github.com/minicri/minicri/test/harness"
)

// Parameters that reset or overwrite others are written first, in whatever order a map has them.
func TestOrderOfNetworkSysctls(t *testing.T) {
	for range 20 {
		spec := &specs.Spec{Linux: &specs.Linux{Sysctl: map[string]string{
			"net.ipv4.conf.eth0.rp_filter": "1", "net.ipv4.conf.all.accept_redirects": "1", "net.ipv4.ip_forward": "1",
			"net.ipv6.conf.lo.disable_ipv6": "0", "net.ipv6.conf.all.disable_ipv6": "1",
			"net.ipv6.conf.default.disable_ipv6": "1",
			"net.ipv6.conf.all.forwarding":       "1", "net.ipv4.conf.eth0/100.rp_filter": "2", "kernel.sem": "1",
		}}}
		harness.Same(t, "the order", fmt.Sprint(oci.TakeNetworkSysctls(spec)), fmt.Sprint([]oci.NetworkSysctl{
			{"net/ipv4/ip_forward", "1"},
			{"net/ipv6/conf/all/forwarding", "1"},
			{"net/ipv4/conf/all/accept_redirects", "1"},
			{"net/ipv6/conf/all/disable_ipv6", "1"},
			{"net/ipv6/conf/default/disable_ipv6", "1"},
			{"net/ipv4/conf/eth0.100/rp_filter", "2"},
			{"net/ipv4/conf/eth0/rp_filter", "1"},
			{"net/ipv6/conf/lo/disable_ipv6", "0"},
		}))
		harness.Same(t, "left in the spec", fmt.Sprint(spec.Linux.Sysctl), "map[kernel.sem:1]")
	}
}

// A range of groups that may ping is lowered to those of the pod's user namespace, as ids of the node.
func TestPingGroupsOfAUserNamespace(t *testing.T) {
	mappings := []*runtimeapi.IDMapping{{ContainerId: 0, HostId: 1000000, Length: 65536}}
	for text, want := range map[string]string{
		"0 2147483647": "1000000 1065535", "0\t100": "1000000 1000100", "1000 1000": "1001000 1001000",
		"70000 80000": "70000 80000", "1 0": "1 0", "x": "x",
	} {
		harness.Same(t, text, oci.HostGroups(text, mappings), want)
	}
}
