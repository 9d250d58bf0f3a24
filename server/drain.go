package server

import (
	"context"
	"fmt"
	"path"
	"slices"
	"sync"

	"github.com/containerd/errdefs"
)

// work counts the calls under way that change something.
type work struct {
	mu    sync.Mutex
	count int
	// idle is closed when the last one ends; nil before drain.
	idle chan struct{}
}

// changing are the calls that are waited for when the daemon ends. All others
// only read, and are answered to the end.
var changing = []string{
	"RunPodSandbox", "StopPodSandbox", "RemovePodSandbox", "UpdatePodSandboxResources",
	"CreateContainer", "StartContainer", "StopContainer", "RemoveContainer", "UpdateContainerResources",
	"ReopenContainerLog", "ExecSync", "CheckpointContainer", "CheckpointPod", "RestorePod", "UpdateRuntimeConfig",
	"PullImage", "RemoveImage", "Import", "Pull", "Tag", "Untag",
}

var errDraining = fmt.Errorf("minicri is shutting down, ask the next daemon: %w", errdefs.ErrUnavailable)

// enter counts a call in, and refuses it when the daemon is about to end.
func (w *work) enter(method string) (leave func(), err error) {
	if !slices.Contains(changing, path.Base(method)) {
		return func() {}, nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.idle != nil {
		return nil, errDraining
	}
	w.count++
	return w.leave, nil
}

func (w *work) leave() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.count--
	if w.count == 0 && w.idle != nil {
		close(w.idle)
	}
}

// Drain refuses the calls that change something from now on, with
// errdefs.ErrUnavailable, and waits for those under way, no longer than the
// context. The others are still answered. It is called once.
func (r *Runtime) Drain(ctx context.Context) error {
	w := &r.work
	w.mu.Lock()
	w.idle = make(chan struct{})
	if w.count == 0 {
		close(w.idle)
	}
	w.mu.Unlock()
	select {
	case <-w.idle:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
