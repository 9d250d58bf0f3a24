package stdio

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// thief is the memory of a pump whose bytes are read by another process, at the
// worst moment: after they were seen and before they are read.
type thief struct {
	t     *testing.T
	other *os.File
	stole chan struct{}
}

func (m *thief) take(int) []byte {
	select {
	case <-m.stole:
	default:
		if _, err := m.other.Read(make([]byte, 100)); err != nil {
			m.t.Error(err)
		}
		close(m.stole)
	}
	return make([]byte, 100)
}

func (m *thief) have(int) {}
func (m *thief) moved()   {}

// What a container writes after it has read its own output is moved.
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
	m := &thief{t: t, other: container, stole: make(chan struct{})}
	got := make(chan string, 10)
	p := newPump(source, m, func(b []byte) { got <- string(b) })
	go p.Run()
	defer func() {
		_ = p.Close()
		<-p.Done()
	}()
	_, _ = container.WriteString("stolen")
	<-m.stole
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
