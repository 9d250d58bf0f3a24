// Package seal keeps programs in memory that nobody can change. It has no state and no
// lock.
package seal

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Executable makes a file in memory that can be executed. It fails where the machine does
// not execute memory (vm.memfd_noexec is 2).
func Executable(name string) (*os.File, error) {
	const flags = unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate(name, flags|unix.MFD_EXEC)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.3 all memory could be executed
		fd, err = unix.MemfdCreate(name, flags)
	}
	if errors.Is(err, unix.EACCES) {
		return nil, fmt.Errorf("programs in memory are forbidden: set vm.memfd_noexec to 1 or 0: %w", os.NewSyscallError("memfd_create", err))
	}
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// Fill copies a program there and closes it to all writers. The seals are those that
// libcontainer asks for.
func Fill(file *os.File, program io.Reader) error {
	if _, err := io.Copy(file, program); err != nil {
		return err
	}
	if err := file.Chmod(0o511); err != nil {
		return err
	}
	return Add(file, unix.F_SEAL_SEAL|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE)
}

// tries to seal, with the pauses between them, are seconds: the kernel waits by itself
// in each of them, for 150 ms.
const (
	tries = 20
	pause = 50 * time.Millisecond
)

// Add adds seals (fcntl(2), F_ADD_SEALS). F_SEAL_WRITE is refused, EBUSY, while anything
// holds a page of the file, and that may be the kernel's own reclaim or compaction of
// memory: it lets go of it.
func Add(file *os.File, seals int) (err error) {
	for range tries {
		_, err = unix.FcntlInt(file.Fd(), unix.F_ADD_SEALS, seals)
		if !errors.Is(err, unix.EBUSY) {
			break
		}
		time.Sleep(pause)
	}
	return os.NewSyscallError("fcntl(F_ADD_SEALS)", err)
}
