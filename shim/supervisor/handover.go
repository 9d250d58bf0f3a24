package supervisor

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/shim/stdio"
	"github.com/minicri/minicri/shim/stdio/journal"
)

// handover is what an upgrade hands to the next build, in a file in memory:
// what is not on disk, and the descriptors that only this process has. Numbers of
// descriptors are those of the process, which stays the same.
type handover struct {
	Version    int                 `json:"version"`
	PausedAt   int64               `json:"paused_at"` // CLOCK_MONOTONIC, in ns
	Lock       int                 `json:"lock"`
	Control    int                 `json:"control"`
	Streams    int                 `json:"streams"`
	Containers map[string]handedOn `json:"containers"`
	// Outputs are the fifos of containers, of a standby alone: see outputs.
	Outputs []int `json:"outputs,omitempty"`

	mu sync.Mutex // guards Containers while they are adopted, several at a time
}

// of is what is handed over of a container.
func (h *handover) of(id string) (handed handedOn, known bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	handed, known = h.Containers[id]
	return handed, known
}

// take is for what has an owner now: closeRest leaves it alone.
func (h *handover) take(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.Containers, id)
}

// handedOn is what is not on disk of a container; descriptors are 0 for none.
type handedOn struct {
	Terminal  int  `json:"terminal,omitempty"`
	Stdin     int  `json:"stdin,omitempty"`
	StdinOnce bool `json:"stdin_once,omitempty"`
	Killed    bool `json:"killed,omitempty"`
	Adopted   bool `json:"adopted,omitempty"`
}

// handoverVersion is the newest that this build can read. A build that reads an
// older one has to fill in what is new.
const handoverVersion = 1

// errNewer says that a state is of a later build.
func errNewer(what string, version, known int) error {
	return fmt.Errorf("%s has version %d, and this build knows %d at most", what, version, known)
}

// renumbered is h for a process that has the descriptors in the order of fds, from
// first on, and is the parent of no container.
func (h *handover) renumbered(fds []int, first int) *handover {
	now := func(fd int) int {
		if i := slices.Index(fds, fd); i >= 0 {
			return first + i
		}
		return 0
	}
	other := &handover{Version: h.Version, PausedAt: int64(monotonic()), Lock: now(h.Lock), Control: now(h.Control), Streams: now(h.Streams), Containers: make(map[string]handedOn)}
	for id, c := range h.Containers {
		c.Terminal, c.Stdin, c.Adopted = now(c.Terminal), now(c.Stdin), true
		other.Containers[id] = c
	}
	return other
}

// outputs are copies of what the output of containers is read from. While one build
// replaces another no process reads, and the kernel drops the content of a fifo that
// no process has open when its container ends: the standby holds them open until
// the new build serves.
func (s *Supervisor) outputs() (fds []int) {
	for _, c := range s.all() {
		streams := c.streams()
		if streams == nil {
			continue
		}
		for _, source := range streams.Sources() {
			if fd, err := duplicate(source); err == nil && fd > 0 {
				fds = append(fds, fd)
			}
		}
	}
	return fds
}

func readHandover(file *os.File) (*handover, error) {
	content, err := io.ReadAll(io.NewSectionReader(file, 0, 1<<30))
	if err != nil {
		return nil, fmt.Errorf("read what is handed over: %w", err)
	}
	h := &handover{}
	if err := json.Unmarshal(content, h); err != nil {
		return nil, fmt.Errorf("read what is handed over: %w", err)
	}
	if h.Version > handoverVersion {
		return nil, errNewer("what is handed over", h.Version, handoverVersion)
	}
	return h, nil
}

// writeHandover puts it into a file in memory.
func writeHandover(h *handover) (*os.File, error) {
	content, err := json.Marshal(h)
	if err != nil {
		return nil, err
	}
	fd, err := unix.MemfdCreate("handover", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	file := os.NewFile(uintptr(fd), "handover")
	if _, err := file.Write(content); err != nil {
		_ = file.Close()
		return nil, err
	}
	return file, nil
}

// inherited is a descriptor that was handed over, nil for none.
func inherited(fd int, name string) *os.File {
	if fd == 0 {
		return nil
	}
	unix.CloseOnExec(fd)
	return os.NewFile(uintptr(fd), name)
}

func (h *handedOn) streams() stdio.Handed {
	return stdio.Handed{Terminal: inherited(h.Terminal, "terminal"), Stdin: inherited(h.Stdin, "stdin")}
}

// closeRest closes what was handed over of containers that have ended or cannot be
// adopted: no other process has these descriptors.
func (h *handover) closeRest() {
	for _, c := range h.Containers {
		for _, fd := range []int{c.Terminal, c.Stdin} {
			if fd != 0 {
				_ = unix.Close(fd)
			}
		}
	}
}

// pause is how long the upgrade has held output up.
func (h *handover) pause() time.Duration { return monotonic() - time.Duration(h.PausedAt) }

func monotonic() time.Duration {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) // cannot fail
	return time.Duration(now.Nano())
}

// CheckState reports whether this build can take over what a supervisor of
// another build holds. It changes nothing.
func (s Serve) CheckState() error {
	h, err := readHandover(s.Handover)
	if err != nil {
		return err
	}
	if h.Control == 0 || h.Streams == 0 || h.Lock == 0 {
		return fmt.Errorf("what is handed over lacks a socket or the lock")
	}
	recorded, err := recordedIn(s.Dir)
	if err != nil {
		return err
	}
	for _, id := range recorded {
		var r record
		path := filepath.Join(s.Dir, "records", id+".json")
		err := readJSON(path, &r)
		if errors.Is(err, os.ErrNotExist) {
			continue // it is in quarantine
		}
		if err != nil {
			return fmt.Errorf("read %s: %w", path, err)
		}
		if r.Version > recordVersion {
			return errNewer(path, r.Version, recordVersion)
		}
	}
	moves, err := journal.Open(filepath.Join(s.Dir, journalFile))
	if err != nil {
		return err
	}
	return moves.Close()
}
