package tree

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/test/harness"
)

// deepTree makes directories within each other, with a file in each that is asked for, and a large one in the last.
func deepTree(t testing.TB, top string, depth, each int) {
	at, err := unix.Open(top, directory, 0)
	harness.Check(t, err)
	for i := range depth {
		harness.Check(t, unix.Mkdirat(at, "d", 0o755))
		for file := range each {
			writeAt(t, at, fmt.Sprintf("%d-%d", i, file), 1)
		}
		next, err := unix.Openat(at, "d", directory, 0)
		harness.Check(t, err)
		harness.Check(t, unix.Close(at))
		at = next
	}
	writeAt(t, at, "last", 1<<20)
	harness.Check(t, unix.Close(at))
}

func writeAt(t testing.TB, at int, name string, size int) {
	fd, err := unix.Openat(at, name, unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o644)
	harness.Check(t, err)
	_, err = unix.Write(fd, make([]byte, size))
	harness.Check(t, err)
	harness.Check(t, unix.Close(fd))
}

// What is wide, has links and files on every level is counted as du(1) does.
func TestMeasureIsThatOfAWalk(t *testing.T) {
	top := t.TempDir()
	deepTree(t, top, 50, 3)
	for i := range 2000 {
		harness.Check(t, os.MkdirAll(filepath.Join(top, "wide", strings.Repeat("x", 200)+fmt.Sprint(i), "within"), 0o755))
	}
	harness.Check(t, os.Link(filepath.Join(top, "0-0"), filepath.Join(top, "wide", "again")))
	harness.Check(t, os.Symlink("/etc", filepath.Join(top, "link")))
	harness.Check(t, unix.Mkfifo(filepath.Join(top, "fifo"), 0o600))
	var want Usage
	seen := map[uint64]bool{}
	harness.Check(t, filepath.WalkDir(top, func(_ string, entry fs.DirEntry, err error) error {
		harness.Check(t, err)
		info, err := entry.Info()
		harness.Check(t, err)
		stat := info.Sys().(*syscall.Stat_t)
		if !seen[stat.Ino] {
			seen[stat.Ino] = true
			want.Inodes++
			want.Bytes += stat.Blocks * 512
		}
		return nil
	}))
	got, err := Measure(t.Context(), top)
	harness.Want(t, err == nil && got == want, "%+v, want %+v: %v", got, want, err)
	harness.Check(t, Remove(top))
	harness.Check(t, Remove(top)) // it is not there
}

// A container may move its directories meanwhile: the walk never leaves the tree, and comes to an end.
func TestMeasureWhileDirectoriesMove(t *testing.T) {
	outside := t.TempDir()
	top := filepath.Join(outside, "top")
	harness.Check(t, os.MkdirAll(filepath.Join(top, "a", "moved"), 0o755))
	harness.Check(t, os.MkdirAll(filepath.Join(top, "b"), 0o755))
	deepTree(t, filepath.Join(top, "a", "moved"), 300, 1)
	for i := range 5000 {
		harness.Check(t, os.WriteFile(filepath.Join(outside, fmt.Sprint(i)), nil, 0o600))
	}
	ctx, stop := context.WithCancel(t.Context())
	moved := make(chan int)
	go func() {
		n := 0
		for ; ctx.Err() == nil; n++ {
			from, to := "a", "b"
			if n%2 == 1 {
				from, to = to, from
			}
			_ = os.Rename(filepath.Join(top, from, "moved"), filepath.Join(top, to, "moved"))
		}
		moved <- n
	}()
	for range 50 {
		usage, err := Measure(ctx, top)
		harness.Want(t, err == nil || errors.Is(err, errUnsteady), "%v", err)
		if usage.Inodes > 2000 { // twice what is there, at most
			t.Fatalf("the walk left the tree: %+v", usage)
		}
	}
	stop()
	t.Logf("moved %d times", <-moved)
}

// attack: containers: a writable layer has thousands of nested directories, and a large file in the last one
// held: they count in the container's disk usage, and are removed with the container
// field: containerd and CRI-O measure by paths up to PATH_MAX, and remove with one descriptor for each level
func TestRemoveLeavesWhatLinksPointAt(t *testing.T) {
	outside, top := t.TempDir(), t.TempDir()
	harness.Check(t, os.WriteFile(filepath.Join(outside, "kept"), nil, 0o600))
	harness.Check(t, os.Symlink(outside, filepath.Join(top, "link")))
	harness.Check(t, os.Mkdir(filepath.Join(top, "moved-1"), 0o755))
	harness.Check(t, os.WriteFile(filepath.Join(top, "moved-1", "file"), nil, 0o600))
	harness.Check(t, os.WriteFile(filepath.Join(top, "moved-2"), nil, 0o600))
	deepTree(t, top, 100*maxDepth+5, 0)
	usage, err := Measure(t.Context(), top)
	harness.Check(t, err)
	harness.Want(t, usage.Inodes >= 100*maxDepth, "%d inodes are counted", usage.Inodes)
	harness.Want(t, usage.Bytes >= 1<<20, "%d bytes are counted", usage.Bytes)
	harness.Check(t, Remove(filepath.Join(top, "link")))
	harness.Check(t, os.Symlink(outside, filepath.Join(top, "link")))
	harness.Check(t, Remove(top))
	_, err = os.Lstat(filepath.Join(outside, "kept"))
	harness.Check(t, err)
}
