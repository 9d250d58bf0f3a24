package journal

import (
	"bytes"
	"encoding/binary"
	"sync/atomic"
	"unsafe"

	"github.com/minicri/minicri/supervisor/stdio/crilog"
)

// BufferSize is how much one move takes at most: what a pipe holds.
const BufferSize = 64 << 10

// The parts of a slot: a page of header, the bytes that were read, and two
// places for the beginning of a line, used in turn.
const (
	headerSize = 4096
	lineStart  = headerSize + BufferSize
	slotSize   = lineStart + 2*crilog.MaxLine
)

// The header: the state word, where the log's entries begin, and the slot's owner.
const (
	inodeAt  = 8
	offsetAt = 16
	ownerAt  = 24 // its length, 2 bytes, then itself
	maxOwner = 512
)

type phase uint8

const (
	free    phase = iota
	reading       // bytes are being read, count at most
	have          // count bytes were read
	writing       // entries of them are being written to the log
	written       // they are in the log, or counted as lost
	idle          // nothing but the beginning of a line
)

// word is what is stored at once.
type word struct {
	phase phase
	place uint8  // of the line, 0 or 1
	line  uint16 // its length
	count uint32 // of the bytes
}

func (w word) encode() uint64 {
	return uint64(w.phase) | uint64(w.place)<<8 | uint64(w.line)<<16 | uint64(w.count)<<32
}

func decode(w uint64) word {
	return word{phase: phase(w), place: uint8(w>>8) & 1, line: uint16(w >> 16), count: uint32(w >> 32)}
}

// Slot is the memory of one stream.
type Slot struct {
	memory []byte
	word   *uint64 // the first of memory
}

func newSlot(memory []byte) *Slot {
	return &Slot{memory: memory, word: (*uint64)(unsafe.Pointer(&memory[0]))}
}

func (s *Slot) load() word   { return decode(atomic.LoadUint64(s.word)) }
func (s *Slot) store(w word) { atomic.StoreUint64(s.word, w.encode()) }

func (s *Slot) change(change func(*word)) {
	w := s.load()
	change(&w)
	s.store(w)
}

func (s *Slot) owner() string {
	length := int(binary.NativeEndian.Uint16(s.memory[ownerAt:]))
	return string(s.memory[ownerAt+2:][:min(length, maxOwner)])
}

func (s *Slot) setOwner(owner string) {
	n := copy(s.memory[ownerAt+2:][:maxOwner], owner)
	binary.NativeEndian.PutUint16(s.memory[ownerAt:], uint16(n))
}

// mark is what the buffer begins with before a read: bytes that are in no UTF-8.
var mark = [16]byte{0xc0, 0xff, 0xc1, 0xfe, 0xc0, 0xff, 0xc1, 0xfe, 0xc0, 0xff, 0xc1, 0xfe, 0xc0, 0xff, 0xc1, 0xfe}

// Begin returns the memory to read into: as many bytes as the pipe has, at most
// BufferSize, so that the read gives all of them or has not been.
func (s *Slot) Begin(pending int) []byte {
	pending = min(pending, BufferSize)
	buffer := s.memory[headerSize:lineStart]
	copy(buffer, mark[:])
	s.change(func(w *word) { w.phase, w.count = reading, uint32(pending) })
	return buffer[:pending]
}

// Have notes what the read gave.
func (s *Slot) Have(n int) { s.change(func(w *word) { w.phase, w.count = have, uint32(n) }) }

// Writing notes where in which file entries are about to be written.
func (s *Slot) Writing(inode uint64, offset int64) {
	binary.NativeEndian.PutUint64(s.memory[inodeAt:], inode)
	binary.NativeEndian.PutUint64(s.memory[offsetAt:], uint64(offset))
	s.change(func(w *word) { w.phase = writing })
}

// Written notes that they are.
func (s *Slot) Written() { s.change(func(w *word) { w.phase = written }) }

// Keep ends a move that has left the beginning of a line.
func (s *Slot) Keep(line []byte) {
	place := 1 - s.load().place
	copy(s.place(place), line)
	s.store(word{phase: idle, place: place, line: uint16(len(line))})
}

func (s *Slot) place(place uint8) []byte {
	return s.memory[lineStart+int(place)*crilog.MaxLine:][:crilog.MaxLine]
}

// Left is what a move that was cut off has left.
type Left struct {
	// Line is the beginning of a line, Data what was read after it.
	Line, Data []byte
	// Logged: all entries of them are in the log.
	Logged bool
	// Begun: entries of them are in the log, in part or whole, in the file of this
	// inode from this offset on.
	Begun  bool
	Inode  uint64
	Offset int64
}

// Left is what the slot of a predecessor has.
func (s *Slot) Left() Left {
	w := s.load()
	left := Left{Line: bytes.Clone(s.place(w.place)[:min(int(w.line), crilog.MaxLine)])}
	data := s.memory[headerSize:lineStart][:min(int(w.count), BufferSize)]
	untouched := bytes.HasPrefix(mark[:], data[:min(len(data), len(mark))])
	switch w.phase {
	case free, idle:
		return left
	case reading:
		if untouched {
			return left
		}
	case writing:
		left.Begun = true
		left.Inode = binary.NativeEndian.Uint64(s.memory[inodeAt:])
		left.Offset = int64(binary.NativeEndian.Uint64(s.memory[offsetAt:]))
	case written:
		left.Logged = true
	}
	left.Data = bytes.Clone(data)
	return left
}
