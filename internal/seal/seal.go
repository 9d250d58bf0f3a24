// Package seal keeps programs in memory that nobody can change. It has no state and no lock.
package seal

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Program copies a program into executable memory, and closes it to all writers with the seals that
// libcontainer asks for. It fails if the machine forbids executable memory (vm.memfd_noexec is 2).
func Program(name string, program io.Reader) (*os.File, error) {
	const flags = unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate(name, flags|unix.MFD_EXEC)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.3 all memory could be executed
		fd, err = unix.MemfdCreate(name, flags)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: programs in memory may be forbidden: set vm.memfd_noexec to 1 or 0", os.NewSyscallError("memfd_create", err))
	}
	file := os.NewFile(uintptr(fd), name)
	if _, err = io.Copy(file, program); err == nil {
		err = errors.Join(file.Chmod(0o511), add(file, unix.F_SEAL_SEAL|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE))
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

// add adds seals (fcntl(2), F_ADD_SEALS). F_SEAL_WRITE fails with EBUSY while anything holds a page of the
// file, such as the kernel's own reclaim or compaction, for a moment. Each try waits 150 ms in the kernel.
func add(file *os.File, seals int) (err error) {
	for range 20 {
		_, err = unix.FcntlInt(file.Fd(), unix.F_ADD_SEALS, seals)
		if !errors.Is(err, unix.EBUSY) {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	return os.NewSyscallError("fcntl(F_ADD_SEALS)", err)
}
