// Package journal keeps what a supervisor has taken out of the fifos of its
// containers and has not brought to their logs yet. It is a file that is mapped
// into memory: what is stored there is there also when the process is killed
// after the next instruction, and its successor brings it to the log. (It does
// not outlive the machine, and need not.)
//
// A Slot is the memory of one stream for one move: bytes are read into it. It is
// acquired before the read and released when they are in the log; while a line
// has no end yet it stays, with the beginning of the line. Its phases:
//
//	free -> reading -> have -> writing -> written -> idle, or free
//
// One 64-bit word has the phase and all lengths, and is stored at once. The
// kernel finishes a read(2) from a pipe before it lets a killed process end, so
// after reading either all bytes are in the slot or none: a mark that the read
// overwrites tells.
//
// Locks: Journal.mu guards the list of free slots and the mappings. A Slot has
// one user.
package journal

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Journal is the file. The zero value has slots in plain memory, which are lost
// with the process.
type Journal struct {
	mu   sync.Mutex
	file *os.File // nil: plain memory
	size int64
	free []*Slot
	left map[string]*Slot // of a predecessor, by owner
}

// segmentSlots are mapped at a time.
const segmentSlots = 8

const segmentSize = segmentSlots * slotSize

// Open maps the journal at path, with what a predecessor has left in it.
func Open(path string) (*Journal, error) {
	j := &Journal{left: make(map[string]*Slot)}
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open journal: %w", err)
	}
	info, err := file.Stat()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open journal: %w", err), file.Close())
	}
	j.file = file
	for ; j.size+segmentSize <= info.Size(); j.size += segmentSize {
		slots, err := j.mapSegment()
		if err != nil {
			return nil, errors.Join(fmt.Errorf("map journal %s: %w", path, err), file.Close())
		}
		j.takeOver(slots)
	}
	return j, nil
}

// mapSegment maps the segment at size.
func (j *Journal) mapSegment() (slots []*Slot, err error) {
	memory, err := unix.Mmap(int(j.file.Fd()), j.size, segmentSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	for i := range segmentSlots {
		slots = append(slots, newSlot(memory[i*slotSize:(i+1)*slotSize]))
	}
	return slots, nil
}

// takeOver adds the slots of a predecessor. Those in use are left for Take.
func (j *Journal) takeOver(slots []*Slot) {
	for _, slot := range slots {
		if slot.load().phase == free {
			j.free = append(j.free, slot)
		} else {
			j.left[slot.owner()] = slot
		}
	}
}

// Acquire returns a slot for a stream by its name. Where no more can be mapped,
// on a full disk, it is plain memory.
func (j *Journal) Acquire(owner string) *Slot {
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(j.free) == 0 {
		j.grow()
	}
	if len(j.free) == 0 {
		return newSlot(make([]byte, slotSize))
	}
	slot := j.free[len(j.free)-1]
	j.free = j.free[:len(j.free)-1]
	slot.setOwner(owner)
	return slot
}

func (j *Journal) grow() {
	if j.file == nil {
		return
	}
	// Allocated, not only made longer: on a full file system a store to memory
	// that has no page would end the process (SIGBUS, mmap(2)).
	err := unix.Fallocate(int(j.file.Fd()), 0, j.size, segmentSize)
	if errors.Is(err, unix.EOPNOTSUPP) {
		err = unix.Ftruncate(int(j.file.Fd()), j.size+segmentSize)
	}
	if err != nil {
		return
	}
	// They are not looked at: a page that is read brings its neighbours into our
	// memory.
	if slots, err := j.mapSegment(); err == nil {
		j.size += segmentSize
		j.free = append(j.free, slots...)
	}
}

// Release gives a slot back. What is in it counts as moved.
func (j *Journal) Release(slot *Slot) {
	slot.store(word{})
	j.mu.Lock()
	defer j.mu.Unlock()
	j.free = append(j.free, slot)
}

// Take returns what a predecessor has left of a stream, nil if nothing.
func (j *Journal) Take(owner string) *Slot {
	j.mu.Lock()
	defer j.mu.Unlock()
	slot := j.left[owner]
	delete(j.left, owner)
	return slot
}

// ReleaseRest releases what a predecessor has left of streams that are gone.
func (j *Journal) ReleaseRest() {
	j.mu.Lock()
	rest := j.left
	j.left = make(map[string]*Slot)
	j.mu.Unlock()
	for _, slot := range rest {
		j.Release(slot)
	}
}

// Close closes the file; what is in it stays.
func (j *Journal) Close() error {
	if j.file == nil {
		return nil
	}
	return j.file.Close()
}
