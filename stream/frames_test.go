package stream

import (
	"bytes"
	"net"
	"slices"
	"testing"
)

// writes is a connection that keeps each write.
type writes struct {
	net.Conn
	list [][]byte
}

func (w *writes) Write(p []byte) (int, error) {
	w.list = append(w.list, bytes.Clone(p))
	return len(p), nil
}

// However a frame's parts come, it is one write.
func TestFrames(t *testing.T) {
	data := append([]byte{0, 0, 0, 3, 1, 0, 0, 5}, "hello"...)
	end := []byte{0, 0, 0, 3, 1, 0, 0, 0}
	control := []byte{0x80, 3, 0, 6, 0, 0, 0, 4, 0, 0, 0, 1}
	for step := 1; step < len(data); step++ {
		w := &writes{}
		f := newFrames(w)
		for _, frame := range [][]byte{data, end, control, data} {
			for part := range slices.Chunk(frame, step) {
				if _, err := f.Write(part); err != nil {
					t.Fatal(err)
				}
			}
			_, _ = f.Write(nil) // as the library does for a frame without data
		}
		if len(w.list) != 4 || !bytes.Equal(w.list[0], data) || !bytes.Equal(w.list[1], end) || !bytes.Equal(w.list[2], control) {
			t.Fatalf("in parts of %d: %q", step, w.list)
		}
	}
}
