package supervisor

import (
	"bytes"
	"fmt"
	"os"
	"testing"
)

// What was released is smaller, and still there when it is needed.
func TestReleaseFilePages(t *testing.T) {
	pages := findFilePages()
	if len(pages) == 0 {
		t.Fatal("no mapping of a file was found, not even that of the program")
	}
	const least = 1024 // KiB; the program alone has several times as much
	before := fileResident(t)
	pages.release()
	if after := fileResident(t); before-after < least {
		t.Errorf("%d KiB of files are in memory after the release, %d before", after, before)
	}
}

// fileResident is how many KiB of files a process has in its address space
// (proc_pid_status(5)).
func fileResident(t *testing.T) (kib int) {
	t.Helper()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(status) {
		if _, err := fmt.Sscanf(string(line), "RssFile: %d kB", &kib); err == nil {
			return kib
		}
	}
	t.Fatal("no RssFile in /proc/self/status")
	return 0
}
