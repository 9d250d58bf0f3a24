// Package pause owns the pause program: the one process of a bare pod. Its
// source is pause.c; build.sh compiles it to pause.elf, which is embedded here
// and written by the daemon into the root file system that all pods share.
package pause

import (
	"embed"
	"fmt"
)

// The pattern also matches pause.c, so that the package compiles before
// pause.elf is built.
//
//go:embed pause.*
var files embed.FS

// Binary returns the pause program, a static ELF executable of this machine's
// architecture. It fails when the daemon was compiled before pause.elf was
// built.
func Binary() ([]byte, error) {
	elf, err := files.ReadFile("pause.elf")
	if err != nil {
		return nil, fmt.Errorf("the pause program is not built in, run `make build`: %w", err)
	}
	return elf, nil
}
