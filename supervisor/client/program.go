package client

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/seal"
)

// Program is the shim's program, sealed in memory: no process can change it, nor
// the container that it starts reach the file through /proc (CVE-2019-5736).
// libcontainer makes such a copy, or a mount in its place, for every process
// that it starts, unless it finds itself in one. It also keeps the supervisor
// of a daemon at that daemon's version while the file is being replaced.
type Program struct {
	path   string
	build  string
	sealed *os.File // nil where executing memory is forbidden
}

// OpenProgram reads the program into memory: its size is what that costs, once
// for all supervisors. Where the machine does not execute memory (vm.memfd_noexec),
// the program is the file.
func OpenProgram(path string) (*Program, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	sealed, err := executableMemory()
	if err != nil {
		digest := sha256.New()
		if _, err := io.Copy(digest, file); err != nil {
			return nil, fmt.Errorf("read %s: %w", path, err)
		}
		return &Program{path: path, build: nameOf(digest)}, nil
	}
	digest := sha256.New()
	if err := fill(sealed, io.TeeReader(file, digest)); err != nil {
		return nil, errors.Join(fmt.Errorf("copy %s into memory: %w", path, err), sealed.Close())
	}
	return &Program{path: "/proc/self/fd/" + strconv.Itoa(int(sealed.Fd())), sealed: sealed, build: nameOf(digest)}, nil
}

// nameOf is the beginning of a digest: enough to distinguish builds.
func nameOf(digest hash.Hash) string { return hex.EncodeToString(digest.Sum(nil))[:16] }

// Build names the program by its content.
func (p *Program) Build() string { return p.build }

// ForOthers is where other processes find it, as long as this one runs.
func (p *Program) ForOthers() string {
	if p.sealed == nil {
		return p.path
	}
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), p.sealed.Fd())
}

// Name is what the program calls itself: its path says nothing.
const Name = "minicri-shim"

func executableMemory() (*os.File, error) {
	const flags = unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate(Name, flags|unix.MFD_EXEC)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.3 all memory could be executed
		fd, err = unix.MemfdCreate(Name, flags)
	}
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	return os.NewFile(uintptr(fd), Name), nil
}

// fill copies the program and closes it to all writers. The seals are those
// that libcontainer asks for (fcntl(2), F_ADD_SEALS).
func fill(sealed *os.File, program io.Reader) error {
	if _, err := io.Copy(sealed, program); err != nil {
		return err
	}
	if err := sealed.Chmod(0o511); err != nil {
		return err
	}
	return seal.Add(sealed, unix.F_SEAL_SEAL|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE)
}

// Path is where to execute it, from this process only.
func (p *Program) Path() string { return p.path }

// Close gives the memory back once no supervisor runs in it.
func (p *Program) Close() error {
	if p.sealed == nil {
		return nil
	}
	return p.sealed.Close()
}
