// Package pause owns the pause program, the one process of a bare pod. build.sh compiles pause.c to
// pause.elf, which the daemon writes into the root file system that all pods share.
package pause

import (
	"embed"
	"fmt"
)

// The pattern also matches pause.c: the package compiles without pause.elf.
//
//go:embed pause.*
var files embed.FS

// Binary returns the pause program, a static ELF executable of this machine's architecture. It fails if the
// daemon was compiled without pause.elf.
func Binary() ([]byte, error) {
	elf, err := files.ReadFile("pause.elf")
	if err != nil {
		return nil, fmt.Errorf("the pause program is not built in, run `make build`: %w", err)
	}
	return elf, nil
}
