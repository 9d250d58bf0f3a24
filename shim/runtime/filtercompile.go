//go:build cgo && seccomp

package runtime

import (
	"fmt"
	"io"
	"os"

	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/seccomp/libseccomp-golang"
	"golang.org/x/sys/unix"
)

// compileFilter has libseccomp compile a profile of initForSeccomp's kind, as
// libcontainer does it (seccomp_linux.go). libcontainer puts a prologue before it
// by which calls newer than libseccomp fail with ENOSYS; here they fail with the
// profile's error like all that is not allowed.
func compileFilter(profile *configs.Seccomp) ([]byte, error) {
	errno := unix.EPERM
	if profile.DefaultErrnoRet != nil {
		errno = unix.Errno(*profile.DefaultErrnoRet)
	}
	filter, err := seccomp.NewFilter(seccomp.ActErrno.SetReturnCode(int16(errno)))
	if err != nil {
		return nil, fmt.Errorf("seccomp: %w", err)
	}
	defer filter.Release()
	for _, call := range profile.Syscalls {
		number, err := seccomp.GetSyscallFromName(call.Name)
		if err != nil {
			continue // one that this architecture does not have
		}
		if err := filter.AddRule(number, seccomp.ActAllow); err != nil {
			return nil, fmt.Errorf("seccomp: allow %s: %w", call.Name, err)
		}
	}
	return exportFilter(filter)
}

func exportFilter(filter *seccomp.ScmpFilter) ([]byte, error) {
	fd, err := unix.MemfdCreate("filter", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	file := os.NewFile(uintptr(fd), "filter")
	defer file.Close()
	if err := filter.ExportBPF(file); err != nil {
		return nil, fmt.Errorf("seccomp: export the filter: %w", err)
	}
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	return io.ReadAll(file)
}
