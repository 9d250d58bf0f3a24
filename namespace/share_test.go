package namespace_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/namespace"
	"github.com/minicri/minicri/test/harness"
)

// neighbour is a directory of pins that other runtimes use, too, on a mount of a given propagation.
func neighbour(t *testing.T, propagation uintptr) string {
	run := t.TempDir()
	harness.Check(t, errors.Join(unix.Mount("run", run, "tmpfs", 0, ""), unix.Mount("", run, "none", propagation, "")))
	t.Cleanup(func() { harness.Check(t, unix.Unmount(run, unix.MNT_DETACH)) })
	directory := filepath.Join(run, "netns")
	harness.Check(t, os.Mkdir(directory, 0o755))
	return directory
}

// pin does what another runtime does for a pod, and unpin what it does at the pod's end.
func pin(path string) error {
	return errors.Join(os.WriteFile(path, nil, 0o444), unix.Mount("/proc/self/ns/net", path, "none", unix.MS_BIND, ""))
}

func unpin(path string) error {
	return errors.Join(unix.Unmount(path, unix.MNT_DETACH), os.Remove(path))
}

// ipNetns is what the first 'ip netns add' does with the directory (ip-netns(8)).
func ipNetns(directory string) error {
	err := unix.Mount("", directory, "none", unix.MS_SHARED|unix.MS_REC, "")
	if !errors.Is(err, unix.EINVAL) {
		return err
	}
	return errors.Join(
		unix.Mount(directory, directory, "none", unix.MS_BIND|unix.MS_REC, ""),
		unix.Mount("", directory, "none", unix.MS_SHARED|unix.MS_REC, ""),
	)
}

// Other runtimes and 'ip netns' use the directory before and after minicri does. All of them can remove what they have
// pinned, whoever came first and however the directory's mount propagates.
func TestNeighboursInTheDirectory(t *testing.T) {
	for _, mount := range []struct {
		name        string
		propagation uintptr
	}{{"shared", unix.MS_SHARED}, {"private", unix.MS_PRIVATE}} {
		for _, ip := range []string{"never", "before", "between", "after"} {
			t.Run(mount.name+", ip netns "+ip, func(t *testing.T) {
				directory := neighbour(t, mount.propagation)
				at := func(when string) {
					if ip == when {
						harness.Check(t, ipNetns(directory))
					}
				}
				early, late := filepath.Join(directory, "cni-early"), filepath.Join(directory, "cni-late")
				at("before")
				harness.Check(t, pin(early))
				n, err := namespace.Open(directory, "m-")
				harness.Check(t, err)
				harness.Check(t, n.Create("a"))
				at("between")
				harness.Check(t, n.Create("b"))
				harness.Check(t, pin(late))
				for _, id := range []string{"a", "b"} {
					harness.Want(t, n.Alive(id), "%s is not alive", id)
				}
				at("after")
				for _, id := range []string{"a", "b"} {
					harness.Check(t, n.Remove(id))
					wantNoPin(t, n, id)
				}
				// In the other cases ip netns covers the others' pins.
				if mount.propagation == unix.MS_SHARED || ip == "never" || ip == "before" {
					harness.Check(t, errors.Join(unpin(early), unpin(late)))
				}
			})
		}
	}
}

// A pod's pin, and its removal, reach a service whose mount namespace is older than minicri's start.
func TestOlderServiceSeesPins(t *testing.T) {
	directory := neighbour(t, unix.MS_SHARED)
	service := exec.Command("unshare", "--mount", "--propagation", "slave",
		"sh", "-c", `echo; while read path; do grep -c " $path " /proc/self/mountinfo; done; true`)
	stdin, err := service.StdinPipe()
	harness.Check(t, err)
	stdout, err := service.StdoutPipe()
	harness.Check(t, err)
	harness.Check(t, service.Start())
	t.Cleanup(func() { harness.Check(t, errors.Join(stdin.Close(), service.Wait())) })
	line := func() string {
		buffer := make([]byte, 100)
		count, err := stdout.Read(buffer)
		harness.Check(t, err)
		return strings.TrimSpace(string(buffer[:count]))
	}
	line() // it runs
	n, err := namespace.Open(directory, "m-")
	harness.Check(t, err)
	sees := func() string {
		_, err := stdin.Write([]byte(n.Path("a") + "\n"))
		harness.Check(t, err)
		return line()
	}
	harness.Check(t, n.Create("a"))
	harness.Same(t, "mounts of the pin in the service", sees(), "1")
	harness.Check(t, n.Remove("a"))
	harness.Same(t, "mounts of the pin in the service after its removal", sees(), "0")
}
