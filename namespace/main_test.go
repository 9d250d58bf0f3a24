package namespace_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/namespace"
	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/isolate"
)

// TestMain keeps the mounts that the tests make away from the machine.
func TestMain(m *testing.M) { os.Exit(isolate.Run(m, nil)) }

func newNamespaces(t *testing.T, mark string) *namespace.Dir {
	directory := filepath.Join(t.TempDir(), "namespaces")
	namespaces, err := namespace.Open(directory, mark)
	harness.Check(t, err)
	t.Cleanup(func() {
		ids, err := namespaces.IDs()
		for _, id := range ids {
			err = errors.Join(err, namespaces.Remove(id))
		}
		harness.Check(t, errors.Join(err, unix.Unmount(directory, unix.MNT_DETACH)))
	})
	return namespaces
}

func put(t *testing.T, path, text string) { harness.Check(t, os.WriteFile(path, []byte(text), 0o600)) }

// within is far more than anything takes that has no limit of its own.
const within = time.Minute

func inode(info fs.FileInfo) uint64 { return info.Sys().(*syscall.Stat_t).Ino }
