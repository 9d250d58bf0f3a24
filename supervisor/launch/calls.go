package launch

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"syscall"
)

// base is the address at which the program puts a list, far from itself and from
// what the kernel gives out.
const base = 0x10000000

// How a call is made (launch.c has the same).
const (
	keep      = 1 << iota // its result is kept
	firstKept             // its first argument is the result that was kept
	mayFail               // an error is no reason to end
	mayMiss               // nor is one that says that there is no such program
	forks                 // its child goes on with the list
	isLast                // and is the process that is launched

	skipShift = 8 // how many calls are left out after a success, from here on
)

// What the program says besides which call failed (launch.c has the same).
const (
	noList     = -1 // the list cannot be read
	helperMade = -2 // the pid of a child that is not the last
	pidMade    = -3 // the pid of the process that is launched
)

// The most that a list may have.
const (
	maxCalls = 4096
	maxData  = 4 << 20
)

// here is AT_FDCWD as an argument.
const here = ^uint64(100) + 1

// calls is a list of system calls, made in the order in which they were added.
type calls struct {
	data  []byte
	words []uint64
	what  []string
	// missing says what is wrong if the list ends, which nothing does that is executed.
	missing string
}

// bytes puts bytes into the list, and returns the address that they will have,
// which is a multiple of 8.
func (c *calls) bytes(b []byte) uint64 {
	at := base + uint64(len(c.data))
	c.data = append(c.data, b...)
	for len(c.data)%8 != 0 {
		c.data = append(c.data, 0)
	}
	return at
}

// text is bytes of a string with its NUL.
func (c *calls) text(s string) uint64 { return c.bytes(append([]byte(s), 0)) }

// numbers is bytes of words of 64 bits.
func (c *calls) numbers(words ...uint64) uint64 {
	var b []byte
	for _, word := range words {
		b = binary.NativeEndian.AppendUint64(b, word)
	}
	return c.bytes(b)
}

// texts is bytes of the addresses of strings, ended by a null pointer, as execve(2)
// takes them.
func (c *calls) texts(list []string) uint64 {
	var addresses []uint64
	for _, s := range list {
		addresses = append(addresses, c.text(s))
	}
	return c.numbers(append(addresses, 0)...)
}

// add adds a call; what says what it does, for the error when it fails.
func (c *calls) add(what string, number uintptr, args ...uint64) { c.put(what, 0, number, args...) }

// keep is add of a call whose result the following ones use.
func (c *calls) keep(what string, number uintptr, args ...uint64) { c.put(what, keep, number, args...) }

// use is add of a call whose first argument is the result that was kept last.
func (c *calls) use(what string, number uintptr, args ...uint64) {
	c.put(what, firstKept, number, append([]uint64{0}, args...)...)
}

// put adds a call that is made as the flags say.
func (c *calls) put(what string, flags uint64, number uintptr, args ...uint64) {
	var padded [6]uint64
	copy(padded[:], args)
	c.words = append(c.words, uint64(number))
	c.words = append(c.words, padded[:]...)
	c.words = append(c.words, flags)
	c.what = append(c.what, what)
}

// WriteTo writes the list for the program.
func (c *calls) WriteTo(w io.Writer) (int64, error) {
	if len(c.what) > maxCalls || len(c.data) > maxData {
		return 0, fmt.Errorf("arguments and environment of %d bytes, %d system calls: %w", len(c.data), len(c.what), syscall.E2BIG)
	}
	size := uint64(len(c.data) + 8*len(c.words))
	var list []byte
	for _, word := range []uint64{size, uint64(len(c.data)), uint64(len(c.what))} {
		list = binary.NativeEndian.AppendUint64(list, word)
	}
	list = append(list, c.data...)
	for _, word := range c.words {
		list = binary.NativeEndian.AppendUint64(list, word)
	}
	n, err := w.Write(list)
	return int64(n), err
}

// failure is the error of the call that failed: a syscall.Errno below what it was to do.
func (c *calls) failure(which int, errno syscall.Errno) error {
	switch {
	case which >= 0 && which < len(c.what):
		return fmt.Errorf("%s: %w", c.what[which], errno)
	case which == len(c.what):
		return errors.New(c.missing)
	}
	return fmt.Errorf("read the list of calls: %w", errno)
}
