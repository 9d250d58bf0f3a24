package serve

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/supervisor/launch"
)

// A program that was let through, and whose end was seen before its byte was read, has
// been started.
func TestBarrierOfAProgramThatEndsAtOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), launch.FIFOFile)
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	fifo, err := os.OpenFile(path, os.O_RDWR|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer fifo.Close()
	if err := fifo.SetReadDeadline(time.Now()); err != nil { // what its end does
		t.Fatal(err)
	}
	if err := readBarrier(fifo); err == nil {
		t.Error("nobody has come, and the barrier is passed")
	}
	if _, err := fifo.WriteString("0"); err != nil {
		t.Fatal(err)
	}
	if err := readBarrier(fifo); err != nil {
		t.Errorf("it has gone on, and the barrier says %v", err)
	}
}
