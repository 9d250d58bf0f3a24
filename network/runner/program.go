package runner

import (
	"bytes"
	"embed"
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// The pattern also matches runner.c, so that the package compiles before
// runner.elf is built.
//
//go:embed runner.*
var files embed.FS

// Program returns the program that stands in for plugins, a static ELF
// executable of this machine's architecture. It fails when the daemon was
// compiled before runner.elf was built.
func Program() ([]byte, error) {
	elf, err := files.ReadFile("runner.elf")
	if err != nil {
		return nil, fmt.Errorf("the plugin runner is not built in, run `make build`: %w", err)
	}
	return elf, nil
}

// install writes the program to path, unless it is there. An older one is
// replaced, never written to: it may be running.
func install(path string) error {
	program, err := Program()
	if err != nil {
		return err
	}
	if installed, err := os.ReadFile(path); err == nil && bytes.Equal(installed, program) {
		return os.Chmod(path, 0o755)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o711); err != nil {
		return fmt.Errorf("install the plugin runner: %w", err)
	}
	next := path + ".new"
	err = os.WriteFile(next, program, 0o755)
	if err == nil {
		err = os.Chmod(next, 0o755) // WriteFile applies the umask
	}
	if err == nil {
		err = os.Rename(next, path)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("install the plugin runner: %w", err), os.RemoveAll(next))
	}
	return nil
}
