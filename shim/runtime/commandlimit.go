package runtime

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"
)

// How long a run of a runtime may take: hooks run in some verbs, the others have
// no reason to take long.
const (
	longRun  = 4 * time.Minute
	shortRun = 30 * time.Second
)

var errAborted = errors.New("it was ended with its container")

// runs are the runs of a runtime that are under way, by container.
type runs struct {
	mu  sync.Mutex
	all map[string]map[int]context.CancelCauseFunc
	n   int
}

// begin is called before a run of a verb, and over after it: the context ends
// with the limit of the verb, or by end.
func (r *runs) begin(id, verb string) (ctx context.Context, over func()) {
	limit := shortRun
	if slices.Contains([]string{"create", "start", "exec"}, verb) {
		limit = longRun
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	timer := time.AfterFunc(limit, func() {
		cancel(fmt.Errorf("it was not done within %v, and was killed: %w", limit, context.DeadlineExceeded))
	})
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.all == nil {
		r.all = make(map[string]map[int]context.CancelCauseFunc)
	}
	if r.all[id] == nil {
		r.all[id] = make(map[int]context.CancelCauseFunc)
	}
	r.n++
	n := r.n
	r.all[id][n] = cancel
	return ctx, func() {
		timer.Stop()
		cancel(nil)
		r.mu.Lock()
		defer r.mu.Unlock()
		if delete(r.all[id], n); len(r.all[id]) == 0 {
			delete(r.all, id)
		}
	}
}

// end ends all runs of a container.
func (r *runs) end(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, cancel := range r.all[id] {
		cancel(errAborted)
	}
}

// endRun kills a program that we have started, and all that it has, the init that
// it was making included.
func endRun(program *os.Process) error {
	killTree(program.Pid, func(int) bool { return true })
	return program.Kill()
}
