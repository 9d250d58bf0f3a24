package container

import (
	"context"
	"fmt"
	"os"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// awaitHostPaths waits until the sources of the mounts answer, whether they are
// there or not. On a mount whose server is gone that may be never, and nothing
// can end such a call, so it is left behind: one for each path, however often a
// container is asked for.
func (s *Store) awaitHostPaths(ctx context.Context, mounts []*runtimeapi.Mount) error {
	for _, mount := range mounts {
		if mount.GetHostPath() == "" {
			continue
		}
		if err := s.awaitHostPath(ctx, mount.GetContainerPath(), mount.GetHostPath()); err != nil {
			return err
		}
	}
	return nil
}

// awaitHostPath waits for one of them; mountPoint is where it is mounted.
func (s *Store) awaitHostPath(ctx context.Context, mountPoint, path string) error {
	answer := s.hostPaths.DoChan(path, func() (any, error) {
		_, _ = os.Stat(path) // its error is returned by the step that needs the path
		return nil, nil
	})
	select {
	case <-answer:
		return nil
	case <-ctx.Done():
		// The kind is that of the mount: the deadline is not the caller's.
		return fmt.Errorf("mount %s: %s on the node does not answer, it may be on a mount whose server is gone: %w: %v",
			mountPoint, path, errdefs.ErrUnavailable, context.Cause(ctx))
	}
}
