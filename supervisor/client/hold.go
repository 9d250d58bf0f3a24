package client

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/supervisor/api"
)

// Held is what the daemon holds of a container, so that nothing is lost while its supervisor is dead: the kernel
// drops the content of a fifo that nobody has open, and the exit status of a process that nobody has a pidfd of.
type Held struct {
	fifos map[string]int   // by path; not in Go's poller, which each write would wake
	init  *process.Process // nil if it had ended
}

// Hold holds the first process of a container, and its fifos, as far as it has any, in the supervisor's dir.
func Hold(dir, id string, init process.Facts) *Held {
	h := &Held{fifos: make(map[string]int)}
	for _, stream := range []string{api.Stdout, api.Stderr} {
		path := filepath.Join(dir, api.StreamDir, id+"."+stream)
		if fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0); err == nil {
			h.fifos[path] = fd
		}
	}
	h.init, _ = process.Open(init) // without it the code is not known if the supervisor is killed, as before Linux 6.15
	return h
}

// Exit is how the first process ended, once it has been reaped, from Linux 6.15 on.
func (h *Held) Exit() (status unix.WaitStatus, known bool) {
	if h == nil || h.init == nil {
		return 0, false
	}
	return h.init.KernelExit()
}

// Release is for a container that has ended. It keeps a fifo that exists: its supervisor removes it once the
// log has all.
func (h *Held) Release() { h.release(exists) }

// Close is for a container that is removed. It may be called on nil, and again.
func (h *Held) Close() { h.release(func(string) bool { return false }) }

func (h *Held) release(but func(path string) bool) {
	if h == nil {
		return
	}
	for path, fd := range h.fifos {
		if !but(path) {
			_ = unix.Close(fd)
			delete(h.fifos, path)
		}
	}
	if h.init != nil {
		_ = h.init.Close()
		h.init = nil
	}
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist)
}
