package launch

import (
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/namespace"
)

// What a launch copies has one mount, however many the node has.
func TestEmptyMounts(t *testing.T) {
	made, err := makeEmptyMounts()
	if err != nil {
		t.Fatal(err)
	}
	defer made.Close()
	threads, err := os.OpenRoot("/proc/self/task") // there is no /proc below
	if err != nil {
		t.Fatal(err)
	}
	defer threads.Close()
	var mounts string
	err = namespace.OnDisposableThread(func() error {
		// Threads share the working directory, and one that does cannot join.
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			return err
		}
		if err := unix.Setns(int(made.Fd()), unix.CLONE_NEWNS); err != nil {
			return err
		}
		file, err := threads.Open(fmt.Sprintf("%d/mountinfo", unix.Gettid()))
		if err != nil {
			return err
		}
		defer file.Close()
		content, err := io.ReadAll(file)
		mounts = string(content)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if strings.Count(mounts, "\n") != 1 || !strings.Contains(mounts, " / / ") || !strings.Contains(mounts, " - tmpfs tmpfs ") {
		t.Errorf("its mounts are\n%s", mounts)
	}
}
