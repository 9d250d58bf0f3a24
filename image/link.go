package image

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync"
	"time"
)

// stalledError ends a pull: the registry has sent nothing for too long.
type stalledError struct {
	method, host, path string
	after              time.Duration
}

func (e stalledError) Error() string {
	return fmt.Sprintf("registry %s sent nothing for %s (%s %s)", e.host, e.after, e.method, e.path)
}

// link is the way to the registry of one pull: every request and every read of a
// body must make progress within timeout. However slow a server is, each byte
// gives it new time; and time that the reader spends unpacking does not count.
type link struct {
	timeout time.Duration

	mu    sync.Mutex // guards bases
	bases []*http.Transport
}

// wrap puts the link under a client that the resolver made.
func (l *link) wrap(client *http.Client) error {
	base := client.Transport
	if wrapped, ok := base.(roundTripper); ok {
		base = wrapped.base
	}
	if t, ok := base.(*http.Transport); ok {
		l.mu.Lock()
		l.bases = append(l.bases, t)
		l.mu.Unlock()
	}
	client.Transport = roundTripper{link: l, base: base}
	return nil
}

// close gives kept connections back.
func (l *link) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, t := range l.bases {
		t.CloseIdleConnections()
	}
}

type roundTripper struct {
	link *link
	base http.RoundTripper
}

func (rt roundTripper) RoundTrip(req *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancelCause(req.Context())
	stalled := stalledError{method: req.Method, host: req.URL.Host, path: req.URL.Path, after: rt.link.timeout}
	timer := time.AfterFunc(rt.link.timeout, func() { cancel(stalled) })
	resp, err := rt.base.RoundTrip(req.WithContext(ctx))
	timer.Stop()
	if err != nil {
		err = causeOf(ctx, err)
		cancel(nil)
		return nil, err
	}
	if resp.StatusCode == http.StatusTooManyRequests {
		waitRetryAfter(ctx, resp.Header.Get("Retry-After"), rt.link.timeout)
	}
	resp.Body = &watchedBody{ReadCloser: resp.Body, ctx: ctx, cancel: cancel, timer: timer, timeout: rt.link.timeout}
	return resp, nil
}

// causeOf puts the reason in place of the bare "context canceled".
func causeOf(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	return err
}

// waitRetryAfter honours what a registry that limits requests asks for, within
// the time that the pull may stand still. The resolver repeats the request.
func waitRetryAfter(ctx context.Context, header string, most time.Duration) {
	seconds, err := strconv.Atoi(header)
	if err != nil || seconds < 1 {
		seconds = 1
	}
	select {
	case <-time.After(min(time.Duration(seconds)*time.Second, most)):
	case <-ctx.Done():
	}
}

// watchedBody runs the timer only while a read waits.
type watchedBody struct {
	io.ReadCloser
	ctx     context.Context
	cancel  context.CancelCauseFunc
	timer   *time.Timer
	timeout time.Duration
}

func (b *watchedBody) Read(p []byte) (int, error) {
	b.timer.Reset(b.timeout)
	n, err := b.ReadCloser.Read(p)
	b.timer.Stop()
	if err != nil && err != io.EOF {
		err = causeOf(b.ctx, err)
	}
	return n, err
}

func (b *watchedBody) Close() error {
	b.timer.Stop()
	b.cancel(nil)
	return b.ReadCloser.Close()
}
