package sandbox

import (
	"context"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// watch notices when pause ends. The goroutine ends when pause does, or when
// its handle is closed: by destroy, or by Close.
func (s *Store) watch(sb *Sandbox) {
	pause := sb.pause
	s.work.Go(func() {
		// Closing is what makes Wait return; destroy may have done it already.
		stop := context.AfterFunc(s.base, func() { _ = pause.Close() })
		defer stop()
		if err := pause.Wait(); err != nil {
			return
		}
		pause.Reap()
		s.noteExit(sb)
	})
}

func (s *Store) noteExit(sb *Sandbox) {
	if sb.lock.Lock(s.base) != nil {
		return
	}
	defer sb.lock.Unlock()
	if !sb.Ready() {
		return
	}
	s.options.Logger.Warn("the pause process ended by itself: the sandbox is not ready any more", "sandbox", sb.ID)
	sb.update(func(f *Facts) { f.ExitedAt = time.Now() })
	if err := s.writeFacts(sb); err != nil {
		s.options.Logger.Error("the end of pause is not on disk; a restart notices it again", "sandbox", sb.ID, "err", err)
	}
	s.emit(sb, runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT)
}
