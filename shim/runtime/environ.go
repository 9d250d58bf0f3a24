package runtime

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/selinux/go-selinux/label"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/environ"
	"github.com/minicri/minicri/internal/seal"
)

// withBytes returns the process as it is to be started when its environment has
// bytes that JSON cannot carry, and the descriptors that it gets after its
// standard streams, which the caller closes; else the process as it is and no
// descriptors. mountLabel is what SELinux lets the container execute and read.
func withBytes(p *specs.Process, mountLabel string) (*specs.Process, files, error) {
	plain, block, err := environ.Take(p.Env)
	if err != nil || block == nil {
		return p, nil, err
	}
	passed, err := environFiles(block, mountLabel)
	if err != nil {
		return nil, nil, fmt.Errorf("environment of any bytes: %w", err)
	}
	changed := *p
	changed.Env = plain
	changed.Args = slices.Concat([]string{environ.Path}, p.Args)
	return &changed, passed, nil
}

// processWithBytes is newProcess of withBytes.
func processWithBytes(p *specs.Process, mountLabel string) (*libcontainer.Process, files, error) {
	p, passed, err := withBytes(p, mountLabel)
	if err != nil {
		return nil, nil, err
	}
	process, err := newProcess(p)
	if err != nil {
		return nil, nil, errors.Join(err, passed.Close())
	}
	process.ExtraFiles = passed
	return process, passed, nil
}

// files are open files that are closed together.
type files []*os.File

// Close closes all of them.
func (f files) Close() error {
	var errs []error
	for _, file := range f {
		errs = append(errs, file.Close())
	}
	return errors.Join(errs...)
}

// environFiles are the descriptors environ.ProgramFD and environ.BlockFD.
func environFiles(block []byte, mountLabel string) (files, error) {
	elf, err := environ.Program()
	if err != nil {
		return nil, err
	}
	var made files
	for _, of := range []struct {
		name    string
		content []byte
		kind    int
	}{{environ.Name, elf, unix.MFD_EXEC}, {"environ", block, 0}} {
		file, err := sealedFile(of.name, of.content, of.kind)
		if err != nil {
			return nil, errors.Join(err, made.Close())
		}
		made = append(made, file)
		if err := label.SetFileLabel(fmt.Sprintf("/proc/self/fd/%d", file.Fd()), mountLabel); err != nil {
			return nil, errors.Join(err, made.Close())
		}
	}
	return made, nil
}

// sealedFile is a file in memory that cannot be changed any more. Kernels before
// 6.3 do not know MFD_EXEC, and need it not (memfd_create(2)).
func sealedFile(name string, content []byte, kind int) (*os.File, error) {
	const flags = unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate(name, flags|kind)
	if errors.Is(err, unix.EINVAL) {
		fd, err = unix.MemfdCreate(name, flags)
	}
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	file := os.NewFile(uintptr(fd), name)
	if _, err := file.Write(content); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	const seals = unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE
	if err := seal.Add(file, seals); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}
