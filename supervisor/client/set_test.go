package client_test

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/client"
)

// listener is a client.Follower.
type listener struct {
	mu     sync.Mutex
	noted  int
	missed int
	lost   chan error
}

func (l *listener) Noted(*api.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.noted++
}

func (l *listener) Missed(string, *client.Client) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.missed++
}

func (l *listener) Lost(_ string, err error) { l.lost <- err }

func (l *listener) counts() (noted, missed int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.noted, l.missed
}

// follow has a set follow the supervisor that serves p, and returns once it has
// been told of the last event.
func (p *pod) follow(events int) (*listener, *client.Set) {
	p.t.Helper()
	set, err := client.NewSet(client.SetOptions{Dir: filepath.Dir(p.dir), Start: client.StartOptions{Binary: shimBinary}, Answer: time.Minute, Logger: slog.Default()})
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(set.Close)
	l := &listener{lost: make(chan error, 1)}
	set.Follow(l)
	if _, err := set.Ensure(p.t.Context(), filepath.Base(p.dir)); err != nil {
		p.t.Fatal(err)
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		if noted, _ := l.counts(); noted >= events {
			return l, set
		}
		if time.Now().After(deadline) {
			noted, missed := l.counts()
			p.t.Fatalf("%d events, missed %d times; want %d", noted, missed, events)
		}
	}
}

// A follower that missed the first events is called to list; one that has seen all
// is not; one that loses the connection learns of that, too.
func TestGapInTheEvents(t *testing.T) {
	p := startPod(t)
	p.run("first", "sleep 1000")
	all, _ := p.follow(2)
	if _, missed := all.counts(); missed != 0 {
		t.Errorf("missed %d times with all events", missed)
	}
	const lives = 90 // of three events each: more than are kept
	for i := range lives {
		id := fmt.Sprint("short", i)
		p.create(id, "true")
		err := p.Delete(t.Context(), id, true)
		for deadline := time.Now().Add(time.Minute); errdefs.IsUnavailable(err) && time.Now().Before(deadline); {
			err = p.Delete(t.Context(), id, true) // each gives it some seconds to end
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	late, _ := p.follow(200)
	if _, missed := late.counts(); missed != 1 {
		t.Errorf("a follower that missed events was called %d times to list, want 1", missed)
	}
	if _, missed := all.counts(); missed != 0 {
		t.Errorf("a follower that has seen all was called %d times to list", missed)
	}
	p.killShim()
	for _, l := range []*listener{all, late} {
		select {
		case <-l.lost:
		case <-time.After(time.Minute):
			t.Error("a lost connection was not reported")
		}
	}
	p.restart()
	reapOrphans()
}

// The start of a container is on disk before its program runs: where it cannot be
// written, the program does not run.
func TestStartIsOnDiskBeforeTheProgramRuns(t *testing.T) {
	p := startPod(t)
	p.create("c", "echo ran; sleep 1000")
	inTheWay := filepath.Join(p.dir, "records", "c.json.new")
	if err := os.Mkdir(inTheWay, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := p.Start(t.Context(), "c"); err == nil {
		t.Error("a start that is not on disk succeeded")
	}
	time.Sleep(200 * time.Millisecond)
	if s, err := p.state(t.Context(), "c"); err != nil || s.Status != api.Status_STATUS_CREATED || s.StartedAt != 0 {
		t.Errorf("after a start that failed: %v, %v", s, err)
	}
	if said := p.log("c"); said != "" {
		t.Errorf("its program ran: %q", said)
	}
	if err := os.RemoveAll(inTheWay); err != nil {
		t.Fatal(err)
	}
	if err := p.Start(t.Context(), "c"); err != nil {
		t.Error(err)
	}
	p.awaitInLog("c", " ran\n")
}
