package network

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/minicri/minicri/network/runner"
)

// follow waits for do, for the end of the limit or of the context, or for the
// end of the daemon. killed is why the plugins were killed, nil if they were
// not.
func (p *plugins) follow(ctx context.Context, run *runner.Run, do func(ctx context.Context, dir string) error) (err, killed error) {
	ctx, cancel := context.WithTimeoutCause(ctx, run.Limit, fmt.Errorf("not done after %v, the plugins were killed", run.Limit))
	defer cancel()
	kill, done := make(chan struct{}), make(chan error, 1)
	go func() {
		done <- untilKilled(ctx, kill, func(ctx context.Context) error { return recovered(func() error { return do(ctx, run.PluginDir()) }) })
	}()
	ended, ending := ctx.Done(), p.ending
	if run.Verb == "ADD" {
		ending = nil // its caller ends with the daemon, and destroys what it was making
	}
	var leave <-chan time.Time
	for {
		select {
		case err := <-done:
			return err, nil
		case <-ending:
			if run.Verb == "STATUS" || run.Verb == "CHECK" {
				close(kill)
				return p.kill(run, done, endLimit), errEnding
			}
			ended, ending, leave = nil, nil, time.After(leaveLimit)
		case <-leave:
			return errLeft, nil
		case <-ended:
			if isClosed(ending) {
				ended = nil // the context ends with the daemon
				continue
			}
			limit := killLimit
			if isClosed(p.ending) {
				limit = endLimit
			}
			close(kill)
			return p.kill(run, done, limit), context.Cause(ctx)
		}
	}
}

// errAnswer: go-cni, or libcni, panicked at what a plugin had answered.
var errAnswer = errors.New("the answer is not what its CNI version says it is")

// recovered makes a panic of go-cni or libcni an error: they panic at an address of an
// interface that is not listed, and at null in the place of an interface.
func recovered(do func() error) (err error) {
	defer func() {
		if reason := recover(); reason != nil {
			err = fmt.Errorf("%w: %v", errAnswer, reason)
		}
	}()
	return do()
}

// untilKilled calls do with a context that ends when the plugins are to be
// killed, which go-cni does then, and not with that of the caller.
func untilKilled(ctx context.Context, kill <-chan struct{}, do func(context.Context) error) error {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	go func() {
		select {
		case <-kill:
			cancel()
		case <-ctx.Done():
		}
	}()
	return do(ctx)
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false // also where it is nil
	}
}

// kill ends the processes of a run, and returns what go-cni makes of it. A plugin
// that go-cni has started may enter its cgroup only after that has been killed:
// its STATUS has no context that would end it then.
func (p *plugins) kill(run *runner.Run, done <-chan error, limit time.Duration) error {
	err, wait := run.Kill(limit), min(limit, returnLimit)
	if err != nil {
		wait = lastLimit // go-cni waits for what was not killed
	}
	for over := time.After(wait); ; {
		select {
		case doErr := <-done:
			return doErr
		case <-over:
			return err
		case <-time.After(firstLook):
			if err == nil {
				err = run.Kill(limit)
			}
		}
	}
}
