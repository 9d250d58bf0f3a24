package serve

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/starter"
	"github.com/minicri/minicri/supervisor/stdio"
)

// newSupervisor returns one that serves nobody; its life ends with stop.
func newSupervisor(t *testing.T) *Supervisor {
	t.Helper()
	s := &Supervisor{dir: t.TempDir(), log: slog.New(slog.DiscardHandler), events: newBroker(), containers: map[string]*container{}, oomClaims: map[string]int{}}
	s.life, s.stop = context.WithCancel(t.Context())
	for _, dir := range []string{api.RecordDir, api.StreamDir, api.ExitDir} {
		must(t, os.Mkdir(filepath.Join(s.dir, dir), 0o700))
	}
	return s
}

// A supervisor with too few descriptors for the output of a container does not serve: the
// next one may have enough.
func TestOutputWithoutDescriptors(t *testing.T) {
	s := newSupervisor(t)
	must(t, writeJSON(s.recordPath("c"), record{Container: starter.Container{ID: "c"}, PID: os.Getpid()}))
	must(t, s.adoptAll()) // its fifos are not there, which is no shortage
	s.forget("c")
	var limit unix.Rlimit
	must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 0, Max: limit.Max}))
	err := s.adopt("c")
	must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	if !stdio.IsShortage(err) {
		t.Errorf("it serves without the output: %v", err)
	}
}

// An adopted container whose cgroup is gone has the kill that its parent has counted since
// then, whatever was killed in others below that before they were adopted.
func TestOOMKillAfterAdoption(t *testing.T) {
	s := newSupervisor(t)
	stat, err := process.ReadStat(os.Getpid())
	must(t, err)
	parent := t.TempDir()
	writeKills(t, parent, 5)
	for id, kills := range map[string]int{"first": 0, "second": 5} {
		dir := filepath.Join(parent, id)
		must(t, os.Mkdir(dir, 0o700))
		writeKills(t, dir, kills)
		r := record{Container: starter.Container{ID: id, Cgroups: map[string]string{"": dir}}, Version: api.RecordVersion, PID: os.Getpid(), StartTime: stat.StartTime, StartedAt: 1}
		must(t, writeJSON(s.recordPath(id), r))
		for _, stream := range []string{api.Stdout, api.Stderr} {
			must(t, unix.Mkfifo(filepath.Join(s.dir, api.StreamDir, id+"."+stream), 0o600))
		}
		must(t, s.adopt(id))
	}
	first, second := s.get("first"), s.get("second")
	first.noteOOM()
	second.noteOOM()
	writeKills(t, parent, 6)
	must(t, os.RemoveAll(filepath.Join(parent, "first")))
	if !first.killedByOOM(syscall.WaitStatus(syscall.SIGKILL)) {
		t.Error("it was killed for want of memory, and is taken for ended by others")
	}
	for _, c := range []*container{first, second} {
		c.streams().Drain()
	}
}

func writeKills(t *testing.T, cgroup string, kills int) {
	t.Helper()
	must(t, os.WriteFile(filepath.Join(cgroup, "memory.events"), fmt.Appendf(nil, "oom 0\noom_kill %d\n", kills), 0o600))
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
