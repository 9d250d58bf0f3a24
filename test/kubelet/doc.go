// Package kubelet tests minicri below a real kubelet, which hack/kubelet
// builds: static pods without an API server, on a node of package harness.
//
// The kubelet runs in the node's network namespace, so it reaches pods as on a
// real node, and in a mount namespace of its own (mount_test.go), which keeps
// the machine out of its reach. Its volumes are in a directory that both share,
// as on a real node. It is asked by its own API, by way of a relay into the
// network namespace.
//
// There is one test, because what takes most of its time can be shared: the
// kubelet's starts, and the minute after which it collects dead pods. Its steps
// are in static_test.go; the files beside it hold for each pod its manifest and
// its check.
//
//	pair_test.go      localhost, init container, sidecar, volume, logs, a restricted
//	                  container; a privileged pod on the host's network
//	summary_test.go   /stats/summary
//	api_test.go       the kubelet's API, exec
//	log_test.go       what the kubelet complains about
package kubelet
