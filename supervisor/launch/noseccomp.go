//go:build !cgo || !seccomp

package launch

import (
	"errors"

	"github.com/opencontainers/runtime-spec/specs-go"
)

func compile(*specs.LinuxSeccomp) (filter, error) {
	return filter{}, errors.New("seccomp: minicri-shim was built without it (build tag seccomp)")
}
