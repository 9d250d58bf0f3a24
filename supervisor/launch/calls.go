package launch

import (
	"encoding/binary"
	"fmt"
	"io"
	"syscall"
)

// base is where the program maps a list, far from itself and from the addresses that the kernel chooses.
const base = 0x10000000

// How a call is made (launch.c has the same).
const (
	keep      = 1 << iota // keeps its result
	firstKept             // takes the kept result as its first argument
	mayFail               // ignores errors
	mayMiss               // ignores that there is no such program
	forks                 // its child goes on with the list
	isLast                // and is the launched process

	skipShift = 8 // from this bit on: how many calls are skipped after a success
)

// Messages of the program, besides the number of a failed call (launch.c has the same).
const (
	noList     = -1 // the list cannot be read
	helperMade = -2 // the pid of a child that is not the last
	pidMade    = -3 // the pid of the launched process
)

// here is AT_FDCWD as an argument.
const here = ^uint64(100) + 1

// calls is a list of system calls, made in the order in which they were added.
type calls struct {
	data    []byte
	words   []uint64
	what    []string
	missing string // the error if the list ends, so no program was executed
}

// bytes puts bytes into the list, and returns the address that they will have, a multiple of 8.
func (c *calls) bytes(b []byte) uint64 {
	at := base + uint64(len(c.data))
	c.data = append(c.data, b...)
	for len(c.data)%8 != 0 {
		c.data = append(c.data, 0)
	}
	return at
}

// text puts a string with its NUL into the list.
func (c *calls) text(s string) uint64 { return c.bytes(append([]byte(s), 0)) }

// numbers puts 64-bit words into the list.
func (c *calls) numbers(words ...uint64) uint64 {
	b, _ := binary.Append(nil, binary.NativeEndian, words) // fixed size
	return c.bytes(b)
}

// texts puts strings and their addresses into the list, null-terminated as execve(2) takes them.
func (c *calls) texts(list []string) uint64 {
	var addresses []uint64
	for _, s := range list {
		addresses = append(addresses, c.text(s))
	}
	return c.numbers(append(addresses, 0)...)
}

// add adds a call; what describes it in errors.
func (c *calls) add(what string, number uintptr, args ...uint64) { c.put(what, 0, number, args...) }

// put adds a call with flags.
func (c *calls) put(what string, flags uint64, number uintptr, args ...uint64) {
	step := [8]uint64{0: uint64(number), 7: flags}
	copy(step[1:7], args)
	c.words = append(c.words, step[:]...)
	c.what = append(c.what, what)
}

// WriteTo writes the list for the program.
func (c *calls) WriteTo(w io.Writer) (int64, error) {
	const maxCalls, maxData = 4096, 4 << 20
	if len(c.what) > maxCalls || len(c.data) > maxData {
		return 0, fmt.Errorf("arguments and environment of %d bytes, %d system calls: %w", len(c.data), len(c.what), syscall.E2BIG)
	}
	head := []uint64{uint64(len(c.data) + 8*len(c.words)), uint64(len(c.data)), uint64(len(c.what))}
	list, _ := binary.Append(nil, binary.NativeEndian, head) // fixed size, as the words are
	list, _ = binary.Append(append(list, c.data...), binary.NativeEndian, c.words)
	n, err := w.Write(list)
	return int64(n), err
}
