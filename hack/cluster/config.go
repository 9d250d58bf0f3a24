package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/minicri/minicri/internal/config"
)

const (
	minicriSocket    = "/run/minicri/minicri.sock"
	containerdSocket = "/run/containerd/containerd.sock"
	// bootstrapToken is what a node proves itself with when it joins. It is good
	// for nothing else, and only in the cluster's network.
	bootstrapToken = "abcdef.0123456789abcdef"
	// bareSubnet is of the pods of a bare node.
	bareSubnet = "10.100.0.0/24"
	// suiteHandler is what Kubernetes' own tests take to be on a node
	// (PreconfiguredRuntimeClassHandler of test/e2e/framework/node/runtimeclass).
	suiteHandler = "test-handler"
)

// object is a part of a configuration file in JSON, which is YAML too.
type object = map[string]any

func (c *cluster) criSocket() string {
	if c.Runtime == containerdRuntime {
		return "unix://" + containerdSocket
	}
	return "unix://" + minicriSocket
}

// configureRuntime writes the configuration of minicri, and of containerd where
// that is the runtime. The bundled network is minicri's for both.
func (n *node) configureRuntime(pause string) error {
	c := config.Default()
	// kubeadm asks for it when the node is joined again; no pod uses it.
	c.Images.Pinned = []string{pause}
	// The other nodes have routes to the pods of this one.
	c.DefaultNetwork.Enabled, c.DefaultNetwork.Masquerade = true, false
	if n.cluster.Bare { // nobody gives it a pod CIDR
		c.DefaultNetwork.Subnet, c.DefaultNetwork.Masquerade = bareSubnet, true
		c.Runtimes = map[string]config.Runtime{suiteHandler: {Type: config.Builtin}}
	}
	file, err := os.Create(n.path("etc-minicri/config.toml"))
	if err != nil {
		return err
	}
	return errors.Join(c.Write(file), file.Close())
}

// kubeletConfiguration is for a machine that the node shares: no evictions for
// what others use, no oom_score_adj that the machine may refuse.
func (c *cluster) kubeletConfiguration() object {
	return object{
		"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
		"failCgroupV1": false, "failSwapOn": false, "oomScoreAdj": 0, "cgroupDriver": "cgroupfs",
		"evictionHard": object{
			"memory.available": "0%", "nodefs.available": "0%", "nodefs.inodesFree": "0%",
			"imagefs.available": "0%", "imagefs.inodesFree": "0%", "pid.available": "0%",
		},
		"imageGCHighThresholdPercent": 100, "maxPods": 250,
		"serializeImagePulls": false, "registryPullQPS": 0, "registryBurst": 0,
		"volumeStatsAggPeriod": "1s", "nodeStatusUpdateFrequency": "4s",
		"kubeAPIQPS": 200, "kubeAPIBurst": 400, "eventRecordQPS": 0,
		"serverTLSBootstrap": false, "featureGates": c.Gates,
	}
}

func (n *node) registration() object {
	return object{
		"name": n.Name, "criSocket": n.cluster.criSocket(), "taints": []any{},
		"ignorePreflightErrors": ignoredPreflight, "imagePullPolicy": "IfNotPresent",
		"kubeletExtraArgs": arguments("node-ip", n.Address, "hostname-override", n.Name),
	}
}

// ignoredPreflight is what kubeadm finds and does not matter here.
var ignoredPreflight = []string{
	"SystemVerification", // cgroup v1, which the kubelet is told to accept
	"Swap",               // the machine's; the kubelet is told to accept it
	"NumCPU", "Mem",      // a small machine makes a slow cluster, not a wrong one
}

// arguments are extra arguments of a component: name, value, name, value ...
func arguments(pairs ...string) []object {
	var list []object
	for i := 0; i < len(pairs); i += 2 {
		list = append(list, object{"name": pairs[i], "value": pairs[i+1]})
	}
	return list
}

// initConfiguration is what kubeadm init is given on the first node.
func (n *node) initConfiguration(version string) []object {
	const api = "kubeadm.k8s.io/v1beta4"
	fast := arguments("kube-api-qps", "200", "kube-api-burst", "400")
	return []object{
		{
			"apiVersion": api, "kind": "InitConfiguration", "nodeRegistration": n.registration(),
			"localAPIEndpoint": object{"advertiseAddress": n.Address},
			"bootstrapTokens":  []object{{"token": bootstrapToken, "ttl": "0s", "usages": []string{"signing", "authentication"}, "groups": []string{"system:bootstrappers:kubeadm:default-node-token"}}},
		},
		{
			"apiVersion": api, "kind": "ClusterConfiguration", "clusterName": n.cluster.Name,
			"kubernetesVersion": version, "imageRepository": repository,
			"networking": object{"podSubnet": podSubnet, "serviceSubnet": serviceNet},
			"apiServer":  object{"certSANs": []string{"127.0.0.1", "localhost"}},
			// A power cut of the machine may take the cluster with it; waiting for
			// the disk at each write would make it slow on a shared one.
			"etcd":              object{"local": object{"imageTag": etcdTag, "extraArgs": arguments("unsafe-no-fsync", "true")}},
			"dns":               object{"imageTag": coreDNSTag},
			"controllerManager": object{"extraArgs": fast},
			"scheduler":         object{"extraArgs": fast},
		},
		n.cluster.kubeletConfiguration(),
		{
			"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
			"mode": "nftables", "clusterCIDR": podSubnet, "oomScoreAdj": 0,
			// These are the machine's, and may not be writable here.
			"conntrack": object{"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
		},
	}
}

// joinConfiguration is what kubeadm join is given. The file says which cluster
// it is; a token to look it up by would have to wait for a controller.
func (n *node) joinConfiguration() []object {
	return []object{{
		"apiVersion": "kubeadm.k8s.io/v1beta4", "kind": "JoinConfiguration", "nodeRegistration": n.registration(),
		"discovery": object{
			"file": object{"kubeConfigPath": discoveryFile}, "tlsBootstrapToken": bootstrapToken,
		},
	}}
}

// writeObjects writes a file of several documents.
func writeObjects(path string, objects []object) error {
	var content []byte
	for _, o := range objects {
		data, err := json.MarshalIndent(o, "", "  ")
		if err != nil {
			return err
		}
		content = fmt.Appendf(content, "---\n%s\n", data)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, content, 0o600)
}
