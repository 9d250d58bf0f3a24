package launch

import (
	"embed"
	"fmt"
)

// Name is the name of the process (comm of proc_pid_stat(5)) until it has become
// the other program.
const Name = "minicri-launch"

// The pattern also matches launch.c, so that the package compiles before
// launch.elf is built.
//
//go:embed launch.*
var files embed.FS

// Program returns a static ELF executable of this machine's architecture. It
// fails when the shim was compiled before launch.elf was built.
func Program() ([]byte, error) {
	elf, err := files.ReadFile("launch.elf")
	if err != nil {
		return nil, fmt.Errorf("the program launch is not built in, run `make build`: %w", err)
	}
	return elf, nil
}
