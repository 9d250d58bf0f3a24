package client

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/shim/api"
)

// upgradeInterval is between two looks at a supervisor that becomes another build.
const upgradeInterval = 2 * time.Millisecond

// Upgrade makes the supervisor that serves dir another build of itself, in the
// same process, and returns when that serves. With an error the old one does, and
// nothing has changed.
func Upgrade(ctx context.Context, dir, program, build string) (*api.InfoResponse, error) {
	old, err := Connect(ctx, dir)
	if err != nil {
		return nil, err
	}
	defer old.Close()
	before, err := old.Info(ctx)
	if err != nil {
		return nil, fmt.Errorf("upgrade the supervisor of %s: %w", dir, err)
	}
	if _, err := old.rpc.Upgrade(ctx, &api.UpgradeRequest{Program: program, Build: build}); !errors.Is(native(err), ErrLost) {
		return nil, fmt.Errorf("upgrade the supervisor of %s: %w", dir, native(err))
	}
	for ; ; time.Sleep(upgradeInterval) {
		info, err := ask(ctx, dir)
		if err == nil && info.GetBuild() == build {
			return info, nil
		}
		if err == nil && info.GetBuild() == before.GetBuild() {
			return nil, fmt.Errorf("the supervisor of %s became build %s, which ended or did not serve in time, and build %s serves on (shim.log there says more): %w", dir, build, before.GetBuild(), errdefs.ErrFailedPrecondition)
		}
		if err == nil {
			err = fmt.Errorf("build %s serves", info.GetBuild())
		}
		if ctx.Err() != nil || errdefs.IsUnavailable(err) && !errors.Is(err, ErrLost) {
			return nil, fmt.Errorf("the supervisor of %s does not serve after its upgrade: %w", dir, err)
		}
	}
}

func ask(ctx context.Context, dir string) (*api.InfoResponse, error) {
	c, err := Connect(ctx, dir)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	return c.Info(ctx)
}

// askLimit is how long the start of a daemon waits for a supervisor to say which
// build it is; upgradeLimit how long for one that becomes another.
const (
	askLimit     = time.Second
	upgradeLimit = 30 * time.Second
)

// upgradeWait is how long the start waits for upgrades, which take tenths of a second. One
// that takes longer goes on: it is refused in the end, or ends our connection to the
// build before as a death does.
const upgradeWait = 5 * time.Second

// Upgrade makes all supervisors that serve the build of this set's options, side
// by side. One that cannot be upgraded serves on as it is, and that is said. It is
// called once, before there is any connection.
func (s *Set) Upgrade(ctx context.Context, program string) error {
	groups, err := s.Groups()
	if err != nil {
		return err
	}
	var wait sync.WaitGroup
	for _, group := range groups {
		wait.Add(1)
		s.work.Go(func() {
			defer wait.Done()
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			defer context.AfterFunc(s.base, cancel)()
			s.upgradeGroup(ctx, group, program)
		})
	}
	done := make(chan struct{})
	s.work.Go(func() {
		wait.Wait()
		close(done)
	})
	select {
	case <-done:
	case <-time.After(upgradeWait):
		s.options.Logger.Warn("the upgrade of a supervisor takes long: the start does not wait for it", "waited", upgradeWait)
	}
	return nil
}

func (s *Set) upgradeGroup(ctx context.Context, group, program string) {
	logger := s.options.Logger.With("supervisor", group)
	asking, cancel := context.WithTimeout(ctx, askLimit)
	info, err := ask(asking, s.Dir(group))
	late := asking.Err() != nil
	cancel()
	switch {
	case err != nil && late:
		logger.Warn("the supervisor did not say in time which build it is: it is not upgraded before the daemon is started again, unless it hangs and is replaced", "limit", askLimit, "wanted", s.options.Start.Build)
		return
	case errdefs.IsNotImplemented(err):
		logger.Info("the supervisor is of a build that cannot be upgraded: it serves until its pods are gone")
		return
	case err != nil || info.GetBuild() == s.options.Start.Build:
		return // none serves, or it is of this build
	}
	upgrading, cancel := context.WithTimeout(ctx, upgradeLimit)
	defer cancel()
	now, err := Upgrade(upgrading, s.Dir(group), program, s.options.Start.Build)
	if err != nil {
		logger.Error("the supervisor could not be upgraded: the old build continues to serve", "build", info.GetBuild(), "wanted", s.options.Start.Build, "err", err)
		return
	}
	logger.Info("the supervisor was upgraded", "from", info.GetBuild(), "to", now.GetBuild(), "paused", time.Duration(now.GetPaused()))
}
