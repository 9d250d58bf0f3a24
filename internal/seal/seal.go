// Package seal closes files in memory to writers. It has no state and no lock.
package seal

import (
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

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
