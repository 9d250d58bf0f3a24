// Package cluster asks minicri for what users of Kubernetes ask: each test is a
// case on two nodes that hack/cluster made, through the API server and kubectl.
//
// `make test-cluster` makes the cluster, runs the tests and takes it down, which
// looks for leaks. Each test has a namespace of its own. Those that end a runtime,
// a kubelet or a node are marked serial and come after the others.
package cluster
