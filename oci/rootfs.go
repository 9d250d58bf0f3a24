package oci

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"

	"golang.org/x/sys/unix"
)

// longestRootfsFile bounds what of an image is read into memory.
const longestRootfsFile = 16 << 20

// readInRootfs reads a file of a container's rootfs as a process in it would
// find it: symbolic links are followed and never lead out. One that is not
// there is empty. What the image puts there instead of a file, a pipe or a
// device, is refused and not waited for.
func readInRootfs(rootfs, name string) (*bytes.Reader, error) {
	file, err := openInRootfs(rootfs, name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return bytes.NewReader(nil), nil
	}
	if err != nil {
		return nil, fmt.Errorf("open %s of the rootfs: %w", name, err)
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return nil, fmt.Errorf("read %s of the rootfs: %w", name, err)
	}
	if !info.Mode().IsRegular() || info.Size() > longestRootfsFile {
		return nil, fmt.Errorf("%s of the rootfs is not a file of at most %d bytes", name, longestRootfsFile)
	}
	content, err := io.ReadAll(io.LimitReader(file, longestRootfsFile))
	if err != nil {
		return nil, fmt.Errorf("read %s of the rootfs: %w", name, err)
	}
	return bytes.NewReader(content), nil
}

// InRootfs is the path on the node, without symbolic links, of a path in a
// rootfs as a process in it would find it; fs.ErrNotExist if there is none. An
// empty path is the root.
func InRootfs(rootfs, name string) (string, error) {
	file, err := openInRootfs(rootfs, path.Join("/", name), unix.O_PATH)
	if err != nil {
		return "", err
	}
	defer file.Close()
	return os.Readlink(fmt.Sprintf("/proc/self/fd/%d", file.Fd()))
}

// openInRootfs lets the kernel keep the path in the rootfs (openat2(2)), which
// holds also while somebody changes it.
func openInRootfs(rootfs, name string, flags uint64) (*os.File, error) {
	root, err := unix.Open(rootfs, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(root)
	for {
		fd, err := unix.Openat2(root, name, &unix.OpenHow{
			Flags:   flags | unix.O_CLOEXEC,
			Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
		})
		// EAGAIN: something was renamed meanwhile, the kernel cannot be sure.
		if err == nil {
			return os.NewFile(uintptr(fd), name), nil
		} else if !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) {
			return nil, err
		}
	}
}
