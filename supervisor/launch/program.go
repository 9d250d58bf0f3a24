package launch

import (
	"bytes"
	"embed"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/minicri/minicri/internal/seal"
)

// name is the name of a process that is launched until it executes its program
// (proc_pid_comm(5)). Nothing may rely on it: others can have it.
const name = "minicri-launch"

// The pattern also matches launch.c, so that the package compiles before
// launch.elf is built.
//
//go:embed launch.*
var files embed.FS

// openProgram puts the program, a static ELF executable of this machine's
// architecture, into memory that cannot be changed any more. It fails when this
// program was compiled before launch.elf was built.
func openProgram() (*os.File, error) {
	elf, err := files.ReadFile("launch.elf")
	if err != nil {
		return nil, fmt.Errorf("the program launch is not built in, run `make build`: %w", err)
	}
	file, err := seal.Executable(name)
	if err != nil {
		return nil, err
	}
	if err := seal.Fill(file, bytes.NewReader(elf)); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

// IsLauncher reports whether a process that was launched has not become its program
// yet. One that has ended has no program.
func IsLauncher(pid int) bool {
	exe, err := os.Readlink("/proc/" + strconv.Itoa(pid) + "/exe")
	return err == nil && strings.HasPrefix(exe, "/memfd:"+name+" ")
}
