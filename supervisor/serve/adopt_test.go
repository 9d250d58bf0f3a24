package serve

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/runtime"
)

// newSupervisor returns one that serves nobody; its life ends with stop.
func newSupervisor(t *testing.T) *Supervisor {
	t.Helper()
	s := &Supervisor{dir: t.TempDir(), log: slog.New(slog.DiscardHandler), events: newBroker(), runtime: &runtime.Runtime{}, containers: map[string]*container{}, oomClaims: map[string]int{}}
	s.life, s.stop = context.WithCancel(t.Context())
	for _, dir := range []string{recordsDir, api.StreamDir, api.ExitDir} {
		must(t, os.Mkdir(filepath.Join(s.dir, dir), 0o700))
	}
	return s
}

// A supervisor with too few descriptors for the output of a container ends, also when it
// serves already: the next one may have enough.
func TestOutputWithoutDescriptors(t *testing.T) {
	s := newSupervisor(t)
	c := s.newContainer(record{Facts: runtime.Facts{ID: "c"}})
	var limit unix.Rlimit
	must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 0, Max: limit.Max}))
	c.adoptStreams()
	must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	if c.ioProblem == nil || s.life.Err() == nil {
		t.Errorf("it serves on without the output: %v", c.ioProblem)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
