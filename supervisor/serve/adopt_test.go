package serve

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/bundle"
	"github.com/minicri/minicri/supervisor/launch"
	"github.com/minicri/minicri/test/harness"
)

// An adopted container whose cgroup is gone has the kill that its parent has counted since
// then, whatever was killed in others below that before they were adopted.
func TestOOMKillAfterAdoption(t *testing.T) {
	s := &Supervisor{dir: t.TempDir(), log: slog.New(slog.DiscardHandler), events: newBroker(), containers: map[string]*container{}, oomClaims: map[string]int{}, oomSeen: map[string]int{}}
	s.life, s.stop = context.WithCancel(t.Context())
	for _, dir := range []string{api.RecordDir, api.StreamDir, api.ExitDir} {
		harness.Check(t, os.Mkdir(filepath.Join(s.dir, dir), 0o700))
	}
	stat, err := process.ReadStat(os.Getpid())
	harness.Check(t, err)
	parent := t.TempDir()
	writeKills(t, parent, 5)
	for path, kills := range harness.Sorted(map[string]int{"first.scope/container": 0, "second": 5, "third": 0}) {
		id, _, _ := strings.Cut(path, ".")
		dir := filepath.Join(parent, path)
		harness.Check(t, os.MkdirAll(dir, 0o700))
		writeKills(t, dir, kills)
		r := record{Container: bundle.Container{ID: id, Cgroups: map[string]string{"": dir}}, Version: api.RecordVersion, PID: os.Getpid(), StartTime: stat.StartTime, StartedAt: 1}
		harness.Check(t, bundle.WriteJSON(s.recordPath(id), r))
		for _, stream := range []string{api.Stdout, api.Stderr} {
			harness.Check(t, unix.Mkfifo(filepath.Join(s.dir, api.StreamDir, id+"."+stream), 0o600))
		}
		harness.Check(t, s.adopt(id))
	}
	first, second, third := s.get("first"), s.get("second"), s.get("third")
	for _, c := range []*container{first, second, third} {
		c.countOOMBefore()
	}
	writeKills(t, parent, 6)
	harness.Check(t, os.RemoveAll(filepath.Join(parent, "first.scope")))
	harness.Want(t, first.killedByOOM(syscall.WaitStatus(syscall.SIGKILL)),
		"it was killed for want of memory, and is taken for ended by others")
	// One process of the second is killed, which goes on.
	writeKills(t, filepath.Join(parent, "second"), 6)
	writeKills(t, parent, 7)
	harness.Check(t, os.RemoveAll(filepath.Join(parent, "third")))
	harness.Want(t, !third.killedByOOM(syscall.WaitStatus(syscall.SIGKILL)), "it was killed by others, and has the kill of another container")
	for _, c := range []*container{first, second, third} {
		c.streams().Drain()
	}
	s.forget("first")
	harness.Same(t, "counters of cgroups of pods", len(s.oomClaims)+len(s.oomSeen), 2)
	harness.Check(t, os.RemoveAll(parent))
	s.forget("second")
	harness.Same(t, "counters of those that are gone", len(s.oomClaims)+len(s.oomSeen), 0)
}

func writeKills(t *testing.T, cgroup string, kills int) {
	harness.Check(t, os.WriteFile(filepath.Join(cgroup, "memory.events"), fmt.Appendf(nil, "oom 0\noom_kill %d\n", kills), 0o600))
}

// A program that was let through, and whose end was seen before its byte was read, has been started.
func TestBarrierOfAProgramThatEndsAtOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), launch.FIFOFile)
	harness.Check(t, unix.Mkfifo(path, 0o600))
	fifo, err := os.OpenFile(path, os.O_RDWR|unix.O_NONBLOCK, 0)
	harness.Check(t, err)
	defer fifo.Close()
	harness.Check(t, fifo.SetReadDeadline(time.Now())) // what its end does
	harness.Want(t, readBarrier(fifo) != nil, "nobody has come, and the barrier is passed")
	_, err = fifo.WriteString("0")
	harness.Check(t, err)
	harness.Check(t, readBarrier(fifo))
}

// The history is bounded: who missed more sees a gap.
func TestHistoryOfEventsIsBounded(t *testing.T) {
	b := newBroker()
	for i := range eventHistory + 10 {
		b.publish(&api.Container{Id: fmt.Sprint(i)})
	}
	events, _ := b.since(0)
	harness.Want(t, len(events) == eventHistory && events[0].Seq == 11, "kept: %d events from number %d on", len(events), events[0].Seq)
	events, _ = b.since(eventHistory + 9)
	harness.Want(t, len(events) == 1, "after the last but one: %v", events)
}
