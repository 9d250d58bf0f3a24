//go:build !cgo || !seccomp

package runtime

import (
	"errors"

	"github.com/opencontainers/runc/libcontainer/configs"
)

func compileFilter(*configs.Seccomp) ([]byte, error) {
	return nil, errors.New("seccomp: the shim was built without it (build tag seccomp)")
}
