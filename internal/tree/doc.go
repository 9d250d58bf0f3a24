// Package tree measures and removes directory trees that containers have written: as
// deep as they like, past PATH_MAX too, with a constant number of descriptors and in
// a time that grows with the number of files.
//
// It keeps no state and no locks. A tree that is measured may change meanwhile; one
// that is removed must have no other user.
package tree

import (
	"errors"

	"golang.org/x/sys/unix"
)

// directory opens a directory, never what a link in its place points at.
const directory = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_CLOEXEC

// batch is how much is read of a directory at a time, in bytes.
const batch = 16 << 10

// readNames reads the next names of a directory, none at its end.
func readNames(fd int, buffer []byte) (names []string, err error) {
	for len(names) == 0 {
		n, err := unix.ReadDirent(fd, buffer)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n <= 0 {
			return nil, err
		}
		_, _, names = unix.ParseDirent(buffer[:n], -1, nil)
	}
	return names, nil
}
