package stdio

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// thief is the memory of a pump whose bytes are read by another process, at the
// worst moment: after they were seen and before they are read.
type thief struct {
	t      *testing.T
	other  *os.File
	steals bool
	moves  chan int
}

func (m *thief) take(int) []byte {
	if m.steals {
		m.steals = false
		if _, err := m.other.Read(make([]byte, 100)); err != nil {
			m.t.Error(err)
		}
	}
	return make([]byte, 100)
}

func (m *thief) have(n int) { m.moves <- n }
func (m *thief) moved()     {}

// A container that reads its own output keeps no move from its end, for which an
// upgrade waits; what it writes then is moved.
func TestPumpBesideAnotherReader(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fifo")
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	source, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	container, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer container.Close()
	m := &thief{t: t, other: container, steals: true, moves: make(chan int, 10)}
	got := make(chan string, 10)
	p := newPump(source, m, func(b []byte) { got <- string(b) })
	go p.Run()
	defer func() {
		_ = p.Close()
		<-p.Done()
	}()
	_, _ = container.WriteString("stolen")
	select {
	case n := <-m.moves:
		if n != 0 {
			t.Errorf("a move of %d bytes that another reader had taken", n)
		}
	case <-time.After(time.Minute):
		t.Fatal("the move does not end")
	}
	_, _ = container.WriteString("next")
	select {
	case text := <-got:
		if text != "next" {
			t.Errorf("moved %q", text)
		}
	case <-time.After(time.Minute):
		t.Fatal("what comes then is not moved")
	}
}

// A source that cannot be opened at first is read when it can be, also when its process
// has ended meanwhile.
func TestPumpOfALateSource(t *testing.T) {
	for _, ended := range []bool{false, true} {
		read, write, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		_, err = write.WriteString("waits")
		if err = errors.Join(err, write.Close()); err != nil {
			t.Fatal(err)
		}
		got := make(chan string, 1)
		p := new(Shared).newPump(nil, func(b []byte) { got <- string(b) })
		tried := make(chan struct{}, 10)
		p.open = func() (*os.File, error) {
			if tried <- struct{}{}; len(tried) < 3 {
				return nil, unix.EMFILE
			}
			return read, nil
		}
		go p.Run()
		<-tried
		if source := p.Source(); source != nil {
			t.Errorf("source %v", source)
		}
		tried <- struct{}{}
		if ended {
			p.Finish()
		}
		<-p.Done()
		if text := <-got; text != "waits" {
			t.Errorf("ended %v: %q", ended, text)
		}
	}
	p := new(Shared).newPump(nil, func([]byte) {})
	p.open = func() (*os.File, error) { return nil, unix.EMFILE }
	go p.Run()
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	<-p.Done()
}
