package contender

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// What a process has written counts, shared or not; pages of a file that it has only
// read do not.
func TestMemory(t *testing.T) {
	const size, few = 32 << 20, 4 << 10 // few in KiB
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(file, size); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name              string
		descriptor        func() (int, error)
		protection, flags int
		want              int
	}{
		{"read from a file", func() (int, error) { return unix.Open(file, unix.O_RDONLY|unix.O_CLOEXEC, 0) }, unix.PROT_READ, unix.MAP_PRIVATE, 0},
		{"written, of its own", func() (int, error) { return -1, nil }, unix.PROT_READ | unix.PROT_WRITE, unix.MAP_PRIVATE | unix.MAP_ANONYMOUS, size >> 10},
		{"written, shmem", func() (int, error) { return unix.MemfdCreate("test", unix.MFD_CLOEXEC) }, unix.PROT_READ | unix.PROT_WRITE, unix.MAP_SHARED, size >> 10},
	} {
		t.Run(test.name, func(t *testing.T) {
			fd, err := test.descriptor()
			if err != nil {
				t.Fatal(err)
			}
			if fd >= 0 {
				defer func() { _ = unix.Close(fd) }()
				if test.want > 0 {
					if err := unix.Ftruncate(fd, size); err != nil {
						t.Fatal(err)
					}
				}
			}
			before := memory(t)
			mapped, err := unix.Mmap(fd, 0, size, test.protection, test.flags|unix.MAP_POPULATE)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = unix.Munmap(mapped) }()
			if got := memory(t) - before; got < test.want-few || got > test.want+few {
				t.Errorf("%d KiB more, want about %d", got, test.want)
			}
		})
	}
}

func memory(t *testing.T) int {
	t.Helper()
	kib, err := Memory(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	return kib
}
