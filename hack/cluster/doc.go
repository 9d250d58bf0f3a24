// Command cluster makes a Kubernetes cluster of this machine alone, as kind
// does: nodes that are namespaces, with minicri, a kubelet and the fixed paths of
// a node in each, joined by kubeadm, the control plane in static pods.
//
//	cluster up [--name NAME] [--nodes N] [--runtime minicri|containerd] [--kubelet-gates GATE=true,...] [--bare]
//	cluster down [--name NAME]
//	cluster node add|remove|restart|reboot NODE
//	cluster load ARCHIVE
//	cluster upgrade-runtime PATH
//	cluster prepare-e2e
//	cluster programs
//	cluster offer DIRECTORY
//	cluster exec NODE COMMAND [ARG...]
//	cluster kubectl [ARG...]
//
// A cluster is a directory, /var/lib/minicri-cluster/NAME, with cluster.json, the
// kubeconfig and a directory for the disk of each node. Commands take its lock;
// no process of this program serves it but the two kinds that hold the
// namespaces: a hub, the network between the nodes with a port on the machine's
// loopback for the API server, and process 1 of each node, which starts the
// runtime and the kubelet again whenever they end. The machine's own network,
// mounts and sysctls are not touched; a node ends when its process 1 does, and
// what is left then are cgroups below one parent and the directory.
//
// Binaries and images are built once for a version and kept in
// /var/cache/minicri-cluster.
package main
