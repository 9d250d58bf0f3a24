package stdio

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// A pipe whose read end is among the spares can be written to; the others stay
// when one is released, in what order ever, and none is left at last.
func TestSpares(t *testing.T) {
	s, err := NewSpares("")
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	const count = 20
	var writers [count]*os.File
	for i := range writers {
		out, in, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		defer in.Close()
		err = s.Keep(fmt.Sprint("c", i), out, out)
		_ = out.Close()
		if err != nil {
			t.Fatal(err)
		}
		writers[i] = in
	}
	// One that a supervisor which died has left twice, and one that is not there.
	if err := errors.Join(s.send("c3", nil), s.Release("unknown")); err != nil {
		t.Fatal(err)
	}
	looked := 0
	if err := s.Find("c5", func(fd int) {
		if _, err := unix.Poll([]unix.PollFd{{Fd: int32(fd)}}, 0); err == nil {
			looked++
		}
	}); err != nil || looked != 2 {
		t.Errorf("%d descriptors of c5 were found, %v", looked, err)
	}
	for round := range count {
		released := (round*7 + 3) % count
		if err := s.Release(fmt.Sprint("c", released)); err != nil {
			t.Fatal(err)
		}
		if _, err := writers[released].WriteString("x"); !errors.Is(err, unix.EPIPE) {
			t.Errorf("released, and a write says %v", err)
		}
		for later := round + 1; later < count; later++ {
			if i := (later*7 + 3) % count; i != released {
				if _, err := writers[i].WriteString("x"); err != nil {
					t.Errorf("round %d: a write to %d: %v", round, i, err)
				}
			}
		}
	}
	if left, err := unix.IoctlGetInt(int(s.Receive.Fd()), unix.TIOCINQ); err != nil || left != 0 {
		t.Errorf("left: %d bytes, %v", left, err)
	}
}

// Sockets that are full refuse what they cannot hold, and give back what they do.
func TestSparesThatAreFull(t *testing.T) {
	s, err := NewSpares("")
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	kept := 0
	for ; err == nil; kept++ {
		err = s.Keep(fmt.Sprint("c", kept), os.Stdin)
	}
	if !errors.Is(err, unix.EAGAIN) || kept < 100 {
		t.Errorf("after %d: %v", kept, err)
	}
	if err := s.Release("c0"); err != nil {
		t.Error(err)
	}
	if err := s.Release("c5"); err != nil {
		t.Error(err)
	}
	if err := s.Keep("again", os.Stdin); err != nil {
		t.Error(err)
	}
}
