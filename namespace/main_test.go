package namespace

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/test/isolate"
)

// TestMain keeps the mounts that the tests make away from the machine.
func TestMain(m *testing.M) { os.Exit(isolate.Run(m, nil)) }

func newNamespaces(t *testing.T, mark string) *Dir {
	t.Helper()
	directory := filepath.Join(t.TempDir(), "namespaces")
	namespaces, err := Open(directory, mark)
	must(t, err)
	t.Cleanup(func() {
		ids, err := namespaces.IDs()
		for _, id := range ids {
			err = errors.Join(err, namespaces.Remove(id))
		}
		if err = errors.Join(err, unix.Unmount(directory, unix.MNT_DETACH)); err != nil {
			t.Error(err)
		}
	})
	return namespaces
}

func put(t *testing.T, path, text string) {
	t.Helper()
	must(t, os.WriteFile(path, []byte(text), 0o600))
}

// within is far more than anything takes that has no limit of its own.
const within = time.Minute

func eventually(t *testing.T, limit time.Duration, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(limit); !is(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", limit, what)
		}
	}
}

func inode(info fs.FileInfo) uint64 { return info.Sys().(*syscall.Stat_t).Ino }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
