package stdio

import (
	"io"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// The fifo that takes a pipe's place is a pipe: bytes go through, the end of one side
// is the end of the other, no descriptor of the container's is non-blocking, and
// nothing is left of it.
func TestLabelledPipe(t *testing.T) {
	dir := t.TempDir()
	r, w, err := openPipe(dir, "system_u:object_r:container_file_t:s0:c1,c2")
	if err != nil {
		t.Fatal(err)
	}
	for name, end := range map[string]*os.File{"reader": r, "writer": w} {
		if flags, err := unix.FcntlInt(end.Fd(), unix.F_GETFL, 0); err != nil || flags&unix.O_NONBLOCK != 0 {
			t.Errorf("%s: flags %#x, %v", name, flags, err)
		}
	}
	go func() {
		_, _ = io.WriteString(w, "text")
		w.Close()
	}()
	if content, err := io.ReadAll(r); err != nil || string(content) != "text" {
		t.Errorf("read %q, %v", content, err)
	}
	r.Close()
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}
