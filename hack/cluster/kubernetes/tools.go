//go:build tools

// Package kubernetes names what is built as tests of Kubernetes, so that go mod
// tidy keeps what they need.
package kubernetes

import (
	_ "k8s.io/kubernetes/test/e2e"
	_ "k8s.io/kubernetes/test/e2e_node"
)
