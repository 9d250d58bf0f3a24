package filepages

import (
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

const least = 1 << 20 // the program alone has several times as much

// What was released is smaller, and still there when it is needed.
func TestRelease(t *testing.T) {
	pages := Find()
	if len(pages) == 0 {
		t.Fatal("no mapping of a file was found, not even that of the program")
	}
	populate(t, pages)
	before := pages.Resident()
	pages.Release()
	if after := pages.Resident(); before < after+least {
		t.Errorf("%d bytes of the program are in memory after the release, %d before", after, before)
	}
}

// populate brings all pages into our memory.
func populate(t *testing.T, pages Pages) {
	t.Helper()
	for _, one := range pages {
		if _, _, errno := unix.Syscall(unix.SYS_MADVISE, one.start, one.end-one.start, unix.MADV_POPULATE_READ); errno != 0 {
			t.Fatal(errno)
		}
	}
}

// Of the program counts what is there, and nothing of what else is mapped, such as a
// database.
func TestResidentIsOfTheProgramAlone(t *testing.T) {
	pages := Find()
	populate(t, pages)
	var whole uintptr
	for _, one := range pages {
		whole += one.end - one.start
	}
	if resident := pages.Resident(); resident > int(whole) || resident < int(whole)/2 {
		t.Errorf("of %d bytes, which were all touched, %d are in memory", whole, resident)
	}
	const size = 32 << 20
	database, err := os.Create(filepath.Join(t.TempDir(), "database"))
	if err != nil {
		t.Fatal(err)
	}
	defer database.Close()
	if err := database.Truncate(size); err != nil {
		t.Fatal(err)
	}
	before := pages.Resident()
	mapped, err := unix.Mmap(int(database.Fd()), 0, size, unix.PROT_READ, unix.MAP_SHARED|unix.MAP_POPULATE)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(mapped) }()
	if after := pages.Resident(); after > before+least {
		t.Errorf("%d bytes of the program are in memory with a file mapped, %d before", after, before)
	}
}

// A database that is mapped already when the list is made is not in it: when it is
// mapped elsewhere, the heap may be where it was.
func TestReleaseLeavesWhatIsMappedInThePlaceOfAFile(t *testing.T) {
	size := 4 * os.Getpagesize()
	database := filepath.Join(t.TempDir(), "database")
	if err := os.WriteFile(database, make([]byte, size), 0o600); err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(database)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for name, flags := range map[string]uintptr{"shared": unix.MAP_SHARED, "private": unix.MAP_PRIVATE} {
		at, err := unix.MmapPtr(int(file.Fd()), 0, nil, uintptr(size), unix.PROT_READ, int(flags))
		if err != nil {
			t.Fatal(err)
		}
		pages := Find()
		heap, err := unix.MmapPtr(-1, 0, at, uintptr(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED)
		if err != nil {
			t.Fatal(err)
		}
		content := unsafe.Slice((*byte)(heap), size)
		content[0] = 1
		pages.Release()
		if content[0] != 1 {
			t.Errorf("%s: what was written where the file had been mapped is gone", name)
		}
		if err := unix.MunmapPtr(heap, uintptr(size)); err != nil {
			t.Fatal(err)
		}
	}
}
