package stdio

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/supervisor/stdio/crilog"
)

// What a container writes after it has read its own output is moved: another reader takes
// bytes at the worst moment, after they were seen and before they are read.
func TestPumpBesideAnotherReader(t *testing.T) {
	container, p, got := pumpOf(t)
	stole := make(chan struct{})
	read := p.read
	p.read = func(source *os.File) ([]byte, error) {
		select {
		case <-stole:
		default:
			if _, err := container.Read(make([]byte, 100)); err != nil {
				t.Error(err)
			}
			close(stole)
		}
		return read(source)
	}
	go p.Run()
	_, _ = container.WriteString("stolen")
	<-stole
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

// pumpOf is a pump of a fifo, and the end of the container.
func pumpOf(t *testing.T) (container *os.File, p *Pump, got chan string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "fifo")
	must(t, unix.Mkfifo(path, 0o600))
	source, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	must(t, err)
	container, err = os.OpenFile(path, os.O_RDWR, 0)
	must(t, err)
	got = make(chan string, 10)
	p = newPump(source, func(b []byte) { got <- string(b) })
	t.Cleanup(func() {
		_ = p.Close()
		<-p.Done()
		_ = container.Close()
	})
	return container, p, got
}

// Where the disk of the spool is full, output goes on without it; and it does not grow with
// a line that never ends.
func TestSpool(t *testing.T) {
	dir := t.TempDir()
	must(t, unix.Mount("none", dir, "tmpfs", 0, "size=256k"))
	t.Cleanup(func() { must(t, unix.Unmount(dir, 0)) })
	log, err := crilog.Open(filepath.Join(t.TempDir(), "log"))
	must(t, err)
	s, err := openSpool(filepath.Join(dir, "spool"))
	must(t, err)
	s.entries = log.Stream("stdout")
	s.entries.Progress = s.logging
	container, p, got := pumpOf(t)
	p.read = s.read
	p.emit = func(b []byte) {
		_, _ = s.entries.Write(b)
		s.logged()
		got <- string(b)
	}
	go p.Run()
	defer func() {
		_ = p.Close()
		<-p.done // it uses the spool
		s.close()
	}()
	send := func(text string) {
		t.Helper()
		_, _ = container.WriteString(text)
		for moved := 0; moved < len(text); {
			select {
			case part := <-got:
				moved += len(part)
			case <-time.After(time.Minute):
				t.Fatal("it is not moved")
			}
		}
	}
	for range 100 {
		send(string(make([]byte, 9000)))
		if s.broken {
			t.Fatal("a line without an end fills the disk")
		}
	}
	must(t, os.WriteFile(filepath.Join(dir, "full"), make([]byte, 200<<10), 0o600))
	send(string(make([]byte, 60000)))
	if !s.broken {
		t.Error("it is said to be kept on a full disk")
	}
	must(t, os.Remove(filepath.Join(dir, "full")))
	send("end\n")
	send("more")
	if s.broken || s.end-s.start != 4 {
		t.Errorf("there is space again: broken %t, %d bytes are kept", s.broken, s.end-s.start)
	}
}
