package client

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"strconv"

	"github.com/minicri/minicri/internal/seal"
)

// Program is the shim's program, sealed in memory: no process can change it, and no container reaches its
// file through /proc (CVE-2019-5736); otherwise libcontainer would make a copy, or a mount, for every
// process. It also keeps supervisors at the daemon's version while the file is being replaced.
type Program struct {
	path   string
	build  string
	sealed *os.File
}

// OpenProgram reads the program into memory, once for all supervisors.
func OpenProgram(path string) (*Program, error) {
	var sealed *os.File
	build, err := read(path, func(program io.Reader) (err error) {
		sealed, err = seal.Program(Name, program)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("copy %s into memory: %w", path, err)
	}
	return &Program{path: "/proc/self/fd/" + strconv.Itoa(int(sealed.Fd())), sealed: sealed, build: build}, nil
}

// BuildOf names the program in a file, as Program.Build does.
func BuildOf(path string) (string, error) {
	return read(path, func(program io.Reader) error {
		_, err := io.Copy(io.Discard, program)
		return err
	})
}

// read has a program read to its end. The beginning of its digest is enough to distinguish builds.
func read(path string, all func(program io.Reader) error) (build string, err error) {
	file, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer file.Close()
	digest := sha256.New()
	if err := all(io.TeeReader(file, digest)); err != nil {
		return "", fmt.Errorf("read %s: %w", path, err)
	}
	return hex.EncodeToString(digest.Sum(nil))[:16], nil
}

// Build names the program by its content.
func (p *Program) Build() string { return p.build }

// ForOthers is where other processes find it, as long as this one runs.
func (p *Program) ForOthers() string {
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), p.sealed.Fd())
}

// Name is what the program calls itself: its path says nothing.
const Name = "minicri-shim"

// Path is where to execute it, from this process only.
func (p *Program) Path() string { return p.path }

// Close releases the memory once no supervisor runs in it.
func (p *Program) Close() error { return p.sealed.Close() }
