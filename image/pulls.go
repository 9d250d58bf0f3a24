package image

import (
	"context"
	"fmt"
	"sync"

	"github.com/containerd/errdefs"
)

// pulls joins equal pulls that run at once: the first starts the work, the
// others wait for it, and it is cancelled when no one waits any more.
type pulls struct {
	ctx  context.Context // ends with the store
	end  context.CancelCauseFunc
	work sync.WaitGroup

	mu      sync.Mutex // guards what follows and the jobs' waiting
	running map[pullKey]*pullJob
}

// pullKey holds the credentials too: pulls with different credentials are not
// merged.
type pullKey struct {
	name     string
	auth     Auth
	platform string
}

type pullJob struct {
	watchers watchers
	cancel   context.CancelCauseFunc
	waiting  int

	done  chan struct{} // closed when image and err are set
	image Image
	err   error
}

func newPulls() *pulls {
	ctx, end := context.WithCancelCause(context.Background())
	return &pulls{ctx: ctx, end: end, running: map[pullKey]*pullJob{}}
}

// join runs work once for all callers with the same key. The end of ctx ends the
// caller's waiting, and the work when the caller was the last to wait.
func (p *pulls) join(ctx context.Context, key pullKey, progress func(Progress), work func(context.Context, func(Progress)) (Image, error)) (Image, error) {
	job, leave, err := p.enter(ctx, key, progress, work)
	if err != nil {
		return Image{}, err
	}
	defer leave()
	select {
	case <-job.done:
		return job.image, job.err
	case <-ctx.Done():
		return Image{}, fmt.Errorf("pull %s: %w", key.name, context.Cause(ctx))
	}
}

func (p *pulls) enter(ctx context.Context, key pullKey, progress func(Progress), work func(context.Context, func(Progress)) (Image, error)) (*pullJob, func(), error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ctx.Err() != nil {
		return nil, nil, fmt.Errorf("pull %s: the image store is closed: %w", key.name, errdefs.ErrUnavailable)
	}
	job := p.running[key]
	if job == nil {
		job = p.start(ctx, key, work)
	}
	job.waiting++
	forget := job.watchers.add(progress)
	return job, func() { forget(); p.leave(key, job) }, nil
}

// start is called with mu held. The work keeps the values of the first caller's
// context, such as its trace, but not its end.
func (p *pulls) start(ctx context.Context, key pullKey, work func(context.Context, func(Progress)) (Image, error)) *pullJob {
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	stop := context.AfterFunc(p.ctx, func() { cancel(context.Cause(p.ctx)) })
	job := &pullJob{cancel: cancel, done: make(chan struct{})}
	p.running[key] = job
	p.work.Go(func() {
		defer close(job.done)
		defer p.forget(key, job)
		defer stop()
		defer cancel(nil)
		job.image, job.err = work(ctx, job.watchers.report)
	})
	return job
}

func (p *pulls) leave(key pullKey, job *pullJob) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if job.waiting--; job.waiting > 0 {
		return
	}
	job.cancel(context.Canceled)
	if p.running[key] == job {
		delete(p.running, key)
	}
}

func (p *pulls) forget(key pullKey, job *pullJob) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.running[key] == job {
		delete(p.running, key)
	}
}

// close cancels what runs and waits until it has ended.
func (p *pulls) close() {
	p.mu.Lock()
	p.end(fmt.Errorf("the image store is closing: %w", errdefs.ErrUnavailable))
	p.mu.Unlock()
	p.work.Wait()
}
