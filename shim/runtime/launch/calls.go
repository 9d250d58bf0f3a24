package launch

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"syscall"
)

// Socket is the descriptor of Program from which it gets the list.
const Socket = 3

// base is the address at which Program puts a list, far from itself and from
// what the kernel gives out.
const base = 0x10000000

// How a call is made (launch.c has the same).
const (
	keep       = 1 << iota // its result is kept
	firstKept              // its first argument is the result that was kept
	secondKept             // its second one is
	mayFail                // an error is no reason to end

	skipShift = 8 // how many calls are left out after that error, from here on
)

// most is what the answer of Program and its list may have.
const (
	mostCalls = 4096
	mostData  = 1 << 20
)

// Calls is a list of system calls, made in the order in which they were added.
type Calls struct {
	data  []byte
	calls []uint64
	what  []string
}

// Bytes puts bytes into the list, and returns the address that they will have,
// which is a multiple of 8.
func (c *Calls) Bytes(b []byte) uint64 {
	at := base + uint64(len(c.data))
	c.data = append(c.data, b...)
	for len(c.data)%8 != 0 {
		c.data = append(c.data, 0)
	}
	return at
}

// String is Bytes of a string with its NUL.
func (c *Calls) String(s string) uint64 { return c.Bytes(append([]byte(s), 0)) }

// Strings is Bytes of the addresses of strings, ended by a null pointer, as
// execve(2) takes them.
func (c *Calls) Strings(list []string) uint64 {
	var addresses []byte
	for _, s := range list {
		addresses = binary.NativeEndian.AppendUint64(addresses, c.String(s))
	}
	return c.Bytes(binary.NativeEndian.AppendUint64(addresses, 0))
}

// Add adds a call; what says what it does, for the error when it fails.
func (c *Calls) Add(what string, number uintptr, args ...uint64) { c.add(what, 0, number, args) }

// Try is Add of a call that may fail.
func (c *Calls) Try(what string, number uintptr, args ...uint64) {
	c.add(what, mayFail, number, args)
}

// If is Add of a call that may fail; the next ones, as many as then says, are made
// only if it does not.
func (c *Calls) If(then int, what string, number uintptr, args ...uint64) {
	c.add(what, mayFail|uint64(then)<<skipShift, number, args)
}

// Keep is Add of a call whose result the following ones use.
func (c *Calls) Keep(what string, number uintptr, args ...uint64) { c.add(what, keep, number, args) }

// Use is Add of a call whose first argument is the result that was kept last.
func (c *Calls) Use(what string, number uintptr, args ...uint64) {
	c.add(what, firstKept, number, append([]uint64{0}, args...))
}

// UseSecond is Add of a call whose second argument is the result that was kept
// last; args are the others.
func (c *Calls) UseSecond(what string, number uintptr, first uint64, args ...uint64) {
	c.add(what, secondKept, number, append([]uint64{first, 0}, args...))
}

func (c *Calls) add(what string, flags uint64, number uintptr, args []uint64) {
	var padded [6]uint64
	copy(padded[:], args)
	c.calls = append(c.calls, uint64(number))
	c.calls = append(c.calls, padded[:]...)
	c.calls = append(c.calls, flags)
	c.what = append(c.what, what)
}

// WriteTo writes the list for Program.
func (c *Calls) WriteTo(w io.Writer) (int64, error) {
	if len(c.what) > mostCalls || len(c.data) > mostData {
		return 0, fmt.Errorf("a list of %d system calls and %d bytes is too long", len(c.what), len(c.data))
	}
	size := uint64(len(c.data) + 8*len(c.calls))
	var list []byte
	for _, word := range []uint64{size, uint64(len(c.data)), uint64(len(c.what))} {
		list = binary.NativeEndian.AppendUint64(list, word)
	}
	list = append(list, c.data...)
	for _, word := range c.calls {
		list = binary.NativeEndian.AppendUint64(list, word)
	}
	n, err := w.Write(list)
	return int64(n), err
}

// ErrEnded says that the process ended before it answered.
var ErrEnded = errors.New("the process was killed")

// ReadAnswer waits for what a call of the list writes to Socket, a single byte,
// and returns the error of the call that failed before it, if any: a
// syscall.Errno below what it was to do.
func (c *Calls) ReadAnswer(r io.Reader) error {
	answer := make([]byte, 8)
	n, err := r.Read(answer)
	switch {
	case n == 1:
		return nil
	case n == len(answer):
		which, errno := int32(binary.NativeEndian.Uint32(answer)), syscall.Errno(binary.NativeEndian.Uint32(answer[4:]))
		return fmt.Errorf("%s: %w", c.name(int(which)), errno)
	case n == 0 && (err == nil || errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET)):
		return ErrEnded
	default:
		return fmt.Errorf("an answer of %d bytes: %w", n, err)
	}
}

func (c *Calls) name(which int) string {
	if which < 0 || which >= len(c.what) {
		return "read what to do"
	}
	return c.what[which]
}
