// Package filepages gives the kernel back those pages of this process's program that
// are not needed any more, such as those of its start. It has no state and no lock.
package filepages

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Pages are the mappings of our program and its libraries that are as they are
// in their files.
type Pages []addresses

type addresses struct{ start, end uintptr }

// Find lists what cannot be written and has no page that was
// (proc_pid_smaps(5)): what relocation has written must not be lost. What is listed
// stays mapped as long as the process lives. A database does not: it is mapped anew as
// it grows, and where it was the Go runtime may then have its heap, which Release would
// empty. Where the list cannot be read it is empty.
func Find() (pages Pages) {
	smaps, err := os.Open("/proc/self/smaps")
	if err != nil {
		return nil // they stay in memory, that is all
	}
	defer smaps.Close()
	program, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return nil
	}
	var one addresses
	fixed := false
	for scanner := bufio.NewScanner(smaps); scanner.Scan(); {
		line := scanner.Bytes()
		first, rest, _ := bytes.Cut(line, []byte{' '})
		switch {
		case bytes.IndexByte(first, '-') > 0: // START-END PERMISSIONS OFFSET DEVICE INODE PATH
			_, err := fmt.Sscanf(string(first), "%x-%x", &one.start, &one.end)
			fixed = err == nil && bytes.HasPrefix(rest, []byte("r-")) && ofProgram(rest, program)
		case fixed && string(first) == "Anonymous:" && bytes.HasSuffix(rest, []byte(" 0 kB")):
			pages = append(pages, one)
		}
	}
	return pages
}

// ofProgram reports whether a mapping is of the program or of a library that it was
// linked with; of PERMISSIONS OFFSET DEVICE INODE PATH.
func ofProgram(mapping []byte, program string) bool {
	path := bytes.IndexByte(mapping, '/')
	if path < 0 || !bytes.Contains(mapping[:path], []byte("p ")) { // private
		return false
	}
	name := string(mapping[path:])
	base := filepath.Base(name)
	return name == program || strings.HasSuffix(base, ".so") || strings.Contains(base, ".so.")
}

// Release takes the pages out of our address space. They stay in the page
// cache, and those that are needed come back by minor faults: a process that
// waits needs few of the thousands that its start has touched.
func (p Pages) Release() {
	for _, one := range p {
		// By the system call itself: the range is no slice of Go's.
		_, _, _ = unix.RawSyscall(unix.SYS_MADVISE, one.start, one.end-one.start, unix.MADV_DONTNEED)
	}
}

// Resident is how much of them is in our address space, in bytes; 0 where that cannot be
// read. proc_pid_pagemap(5) has a word for each page, in whose highest bit is whether it
// is there: no other mapping counts, such as that of a database, and it takes a
// hundredth of the time of smaps.
func (p Pages) Resident() (bytes int) {
	pagemap, err := os.Open("/proc/self/pagemap")
	if err != nil {
		return 0
	}
	defer pagemap.Close()
	const word, highest = 8, 7 // in bytes; x86 and ARM are little-endian
	size := uintptr(os.Getpagesize())
	words := make([]byte, 1024*word)
	for _, one := range p {
		section := io.NewSectionReader(pagemap, int64(one.start/size*word), int64((one.end-one.start)/size*word))
		for {
			n, err := section.Read(words)
			for i := highest; i < n; i += word {
				bytes += int(words[i]>>7) * int(size)
			}
			if err != nil {
				break
			}
		}
	}
	return bytes
}
