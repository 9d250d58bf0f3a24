package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/test/harness"
)

// pausePID is the id of a pod's pause process.
func pausePID(t testing.TB, n *harness.Node, id string) int {
	t.Helper()
	pid := verbose(t, n, id).PID
	if exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid)); err != nil || filepath.Base(exe) != "pause" {
		t.Fatalf("process %d of pod %s is not pause but %q: %v", pid, id, exe, err)
	}
	return pid
}

// procFile reads a file of /proc/PID.
func procFile(t testing.TB, pid int, name string) string {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
	check(t, err)
	return strings.TrimSpace(string(data))
}

// statusField is a line of /proc/PID/status, its fields with one blank between.
func statusField(t testing.TB, pid int, name string) string {
	t.Helper()
	for line := range strings.Lines(procFile(t, pid, "status")) {
		if value, found := strings.CutPrefix(line, name+":"); found {
			return strings.Join(strings.Fields(value), " ")
		}
	}
	t.Fatalf("/proc/%d/status has no %s", pid, name)
	return ""
}

// namespace names a namespace of a process as the kernel does: "net:[4026531840]".
func namespace(t testing.TB, pid int, kind string) string {
	t.Helper()
	name, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, kind))
	check(t, err)
	return name
}

// alive reports whether a process runs; a zombie does not.
func alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, after, _ := strings.Cut(string(stat), ") ")
	return !strings.HasPrefix(after, "Z") && !strings.HasPrefix(after, "X")
}

// inside calls do on a thread in namespaces of a process, which ends then: a
// thread in another mount namespace cannot be given back. Kinds are CLONE_NEW*
// constants by the names of /proc/PID/ns.
func inside(t testing.TB, pid int, kinds map[string]int, do func() error) {
	t.Helper()
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// The main thread does not end; another one takes over.
			defer runtime.UnlockOSThread()
			inner := make(chan error, 1)
			go func() {
				runtime.LockOSThread()
				inner <- enterAndDo(pid, kinds, do)
			}()
			done <- <-inner
			return
		}
		done <- enterAndDo(pid, kinds, do)
	}()
	check(t, <-done)
}

func enterAndDo(pid int, kinds map[string]int, do func() error) error {
	for kind, flag := range kinds {
		if kind == "mnt" {
			if err := unix.Unshare(unix.CLONE_FS); err != nil {
				return err
			}
		}
		file, err := os.Open(fmt.Sprintf("/proc/%d/ns/%s", pid, kind))
		if err != nil {
			return err
		}
		err = unix.Setns(int(file.Fd()), flag)
		file.Close()
		if err != nil {
			return fmt.Errorf("enter the %s namespace of %d: %w", kind, pid, err)
		}
	}
	return do()
}

// inNetwork calls do in the network namespace of a process.
func inNetwork(t testing.TB, pid int, do func() error) {
	t.Helper()
	inside(t, pid, map[string]int{"net": unix.CLONE_NEWNET}, do)
}

// netSysctl reads a parameter in the network namespace of a process:
// /proc/sys/net shows that of the reading thread.
func netSysctl(t testing.TB, pid int, name string) (value string) {
	t.Helper()
	inNetwork(t, pid, func() error {
		data, err := os.ReadFile("/proc/sys/" + strings.ReplaceAll(name, ".", "/"))
		value = strings.TrimSpace(string(data))
		return err
	})
	return value
}
