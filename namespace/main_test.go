package namespace

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// inside is set in the test process that has namespaces of its own.
const inside = "NAMESPACE_TEST_INSIDE"

// TestMain runs the tests in a network and a mount namespace of their own:
// none of the mounts that they make may reach the machine.
func TestMain(m *testing.M) {
	if os.Getenv(inside) == "" {
		os.Exit(runInside())
	}
	os.Exit(m.Run())
}

func runInside() int {
	command := exec.Command("/proc/self/exe", os.Args[1:]...)
	command.Env = append(os.Environ(), inside+"=1")
	command.Stdin, command.Stdout, command.Stderr = os.Stdin, os.Stdout, os.Stderr
	command.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS, Pdeathsig: unix.SIGKILL}
	err := command.Run()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		return max(exit.ExitCode(), 1)
	case err != nil:
		fmt.Fprintln(os.Stderr, "these tests need root, to make namespaces:", err)
		return 1
	}
	return 0
}

func newNamespaces(t *testing.T, mark string) *Dir {
	t.Helper()
	directory := filepath.Join(t.TempDir(), "namespaces")
	namespaces, err := Open(directory, mark)
	if err != nil {
		t.Fatal(err)
	}
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
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func wantError(t *testing.T, err error, says ...string) {
	t.Helper()
	for _, s := range says {
		if err == nil || !strings.Contains(err.Error(), s) {
			t.Fatalf("got %v, want an error that says %q", err, s)
		}
	}
}

// within is far more than anything takes that has no limit of its own.
const within = 20 * time.Second

func eventually(t *testing.T, limit time.Duration, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(limit); !is(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", limit, what)
		}
	}
}

func inode(info fs.FileInfo) uint64 { return info.Sys().(*syscall.Stat_t).Ino }
