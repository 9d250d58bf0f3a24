package pipe

import (
	"io"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/test/harness"
)

// The fifo that takes a pipe's place is a pipe: bytes go through, the end of one side is the end of the other, no
// descriptor of the container's is non-blocking, and nothing is left of it.
func TestLabelledPipe(t *testing.T) {
	dir := t.TempDir()
	r, w, err := Open(dir, "system_u:object_r:container_file_t:s0:c1,c2")
	harness.Check(t, err)
	for name, end := range harness.Sorted(map[string]*os.File{"reader": r, "writer": w}) {
		flags, err := unix.FcntlInt(end.Fd(), unix.F_GETFL, 0)
		harness.Want(t, err == nil && flags&unix.O_NONBLOCK == 0, "%s: flags %#x, %v", name, flags, err)
	}
	go func() {
		_, _ = io.WriteString(w, "text")
		w.Close()
	}()
	content, err := io.ReadAll(r)
	harness.Want(t, err == nil && string(content) == "text", "read %q, %v", content, err)
	r.Close()
	left, err := os.ReadDir(dir)
	harness.Want(t, err == nil && len(left) == 0, "left: %v, %v", left, err)
}

// A container that writes little at a time is read some thousand times a second at most; pages are moved at once.
//
// attack: denial of service: a container writes bytes one by one into a pipe of one page in packet mode
// held: the supervisor reads 64 such chunks in 64 ms, and others at once
func TestPaceOfSmallChunks(t *testing.T) {
	now := time.Now()
	p := NewPace()
	for range 10 * smallChunks {
		harness.Same(t, "after a page", p.After(4096, now), time.Duration(0))
	}
	var waited time.Duration
	for range 10 * smallChunks {
		now = now.Add(time.Microsecond)
		wait := p.After(1, now)
		waited, now = waited+wait, now.Add(wait)
	}
	harness.Want(t, waited > 9*smallChunks*time.Millisecond, "it waited %v", waited)
	for range 10 * smallChunks { // one that writes seldom does not wait
		now = now.Add(2 * time.Millisecond)
		harness.Same(t, "after a while", p.After(1, now), time.Duration(0))
	}
}
