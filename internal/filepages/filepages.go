// Package filepages gives the kernel back those pages of this process's program that
// are not needed any more, such as those of its start. It has no state and no lock.
package filepages

import (
	"bufio"
	"bytes"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Pages are the mappings of our program and its libraries that are as they are
// in their files.
type Pages []addresses

type addresses struct{ start, end uintptr }

// Find lists what cannot be written and has no page that was
// (proc_pid_smaps(5)): what relocation has written must not be lost. Nothing
// is mapped later. Where the list cannot be read it is empty.
func Find() (pages Pages) {
	smaps, err := os.Open("/proc/self/smaps")
	if err != nil {
		return nil // they stay in memory, that is all
	}
	defer smaps.Close()
	var one addresses
	fixed := false
	for scanner := bufio.NewScanner(smaps); scanner.Scan(); {
		line := scanner.Bytes()
		first, rest, _ := bytes.Cut(line, []byte{' '})
		switch {
		case bytes.IndexByte(first, '-') > 0: // START-END PERMISSIONS OFFSET DEVICE INODE PATH
			_, err := fmt.Sscanf(string(first), "%x-%x", &one.start, &one.end)
			fixed = err == nil && bytes.HasPrefix(rest, []byte("r-")) && bytes.IndexByte(rest, '/') > 0
		case fixed && string(first) == "Anonymous:" && bytes.HasSuffix(rest, []byte(" 0 kB")):
			pages = append(pages, one)
		}
	}
	return pages
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

// Resident is how much of files and of shared memory is in our address space, in bytes
// (the third field of proc_pid_statm(5)); 0 where that cannot be read.
func Resident() int {
	statm, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0
	}
	var size, resident, shared int
	if _, err := fmt.Sscan(string(statm), &size, &resident, &shared); err != nil {
		return 0
	}
	return shared * os.Getpagesize()
}
