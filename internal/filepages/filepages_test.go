package filepages

import (
	"fmt"
	"os"
	"testing"
)

// What was released is smaller, and still there when it is needed.
func TestRelease(t *testing.T) {
	pages := Find()
	if len(pages) == 0 {
		t.Fatal("no mapping of a file was found, not even that of the program")
	}
	const least = 1 << 20 // the program alone has several times as much
	before := resident(t)
	pages.Release()
	if after := resident(t); before < after+least {
		t.Errorf("%d bytes of files are in memory after the release, %d before", after, before)
	}
}

// resident is how many bytes of files are in our address space
// (proc_pid_statm(5), shared).
func resident(t *testing.T) uint64 {
	t.Helper()
	statm, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Fatal(err)
	}
	var size, pages, files uint64
	if _, err := fmt.Sscan(string(statm), &size, &pages, &files); err != nil {
		t.Fatal(err)
	}
	return files * uint64(os.Getpagesize())
}
