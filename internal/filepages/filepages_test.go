package filepages

import "testing"

// What was released is smaller, and still there when it is needed.
func TestRelease(t *testing.T) {
	pages := Find()
	if len(pages) == 0 {
		t.Fatal("no mapping of a file was found, not even that of the program")
	}
	const least = 1 << 20 // the program alone has several times as much
	before := Resident()
	pages.Release()
	if after := Resident(); before < after+least {
		t.Errorf("%d bytes of files are in memory after the release, %d before", after, before)
	}
}
