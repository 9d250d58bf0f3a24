//go:build tools

// Package critest imports the packages of the test binary of sigs.k8s.io/cri-tools/cmd/critest:
// that command has only test files, so no package can import it and
// `go mod tidy` would forget its dependencies.
package critest

import (
	_ "sigs.k8s.io/cri-tools/pkg/benchmark"
	_ "sigs.k8s.io/cri-tools/pkg/framework"
	_ "sigs.k8s.io/cri-tools/pkg/validate"
)
