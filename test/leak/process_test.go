package leak

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// program copies sleep under a name of its own, so that nothing else on the
// machine can be meant.
func program(t *testing.T) (path, name string) {
	t.Helper()
	name = fmt.Sprintf("lk%d", os.Getpid())
	path = filepath.Join(t.TempDir(), name)
	sleep, err := exec.LookPath("sleep")
	must(t, err)
	data, err := os.ReadFile(sleep)
	must(t, err)
	must(t, os.WriteFile(path, data, 0o700))
	return path, name
}

func start(t *testing.T, name string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(name, args...)
	must(t, cmd.Start())
	return cmd
}

func end(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	must(t, cmd.Process.Kill())
	cmd.Wait() // its error is the kill
}

func TestProcess(t *testing.T) {
	path, name := program(t)
	var cmd *exec.Cmd
	expectLeak(t, Scope{Executables: []string{name}}, Process, name,
		func() { cmd = start(t, path, "600") },
		func() { end(t, cmd) })
}

func TestNamespaceOfProcess(t *testing.T) {
	for _, kind := range []string{"net", "user"} {
		cmd := start(t, "unshare", "--"+kind, "sleep", "600")
		namespace := waitForNamespace(t, cmd.Process.Pid, kind)
		expectNamespace(t, kind, namespace, true)
		end(t, cmd)
		expectNamespace(t, kind, namespace, false)
	}
}

// waitForNamespace returns the namespace of a process that unshare makes into
// sleep. Comparing with our own would not do: each of our threads may be in
// another, and which one forks is the scheduler's choice.
func waitForNamespace(t *testing.T, pid int, kind string) string {
	t.Helper()
	eventually(t, fmt.Sprintf("process %d is sleep", pid), func() bool { return command(pid) == "sleep" })
	namespace, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, kind))
	must(t, err)
	return namespace
}

// expectNamespace looks for one namespace only: other work on the machine has
// namespaces that come and go.
func expectNamespace(t *testing.T, kind, name string, want bool) {
	t.Helper()
	eventually(t, fmt.Sprintf("namespace %s is found: %t", name, want), func() bool {
		return contains(Diff(Snapshot{}, take(t, Scope{Namespaces: []string{kind}})), name) == want
	})
}

func contains(leaks []Leak, name string) bool {
	for _, l := range leaks {
		if l.Kind == Namespace && l.Name == name {
			return true
		}
	}
	return false
}

func TestDescriptor(t *testing.T) {
	scope := Scope{Descriptors: []int{os.Getpid()}}
	path := filepath.Join(t.TempDir(), "file")
	var file *os.File
	expectLeak(t, scope, Descriptor, path,
		func() {
			var err error
			file, err = os.Create(path)
			must(t, err)
		},
		func() { file.Close() })

	var socket int
	expectLeak(t, scope, Descriptor, "socket",
		func() {
			var err error
			socket, err = unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			must(t, err)
		},
		func() { unix.Close(socket) })
}
