package image

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
)

// stalledError ends a pull whose registry has sent too little for too long.
type stalledError struct {
	method, host, path string
	after              time.Duration
	bytes, minimum     int64 // in that time; a minimum of bytes per second
}

func (e stalledError) Error() string {
	if e.bytes > 0 {
		return fmt.Sprintf("registry %s sent %d bytes in %s, less than the minimum of %d bytes per second (%s %s)", e.host, e.bytes, e.after, e.minimum, e.method, e.path)
	}
	return fmt.Sprintf("registry %s sent nothing for %s (%s %s)", e.host, e.after, e.method, e.path)
}

// link is the way to the registry of one pull. Each request and each read of a body must
// make progress within timeout, and a body come with minRate on average over timeout,
// without the time that its reader takes. What is no blob is read up to maxManifest.
//
// Above the connection it gives the library the answers that it expects of registries: see adapt.
type link struct {
	timeout time.Duration
	minRate int64 // bytes per second
	pull    *credentials
	base    http.RoundTripper
}

// RoundTrip implements http.RoundTripper. It repeats what failed for a moment, where no other host can be asked.
func (l link) RoundTrip(req *http.Request) (*http.Response, error) {
	for pause := firstPause; ; pause *= 2 {
		resp, err := l.send(req)
		if err != nil && req.Method == http.MethodHead && (errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET)) {
			return noHead(req), nil
		}
		if err != nil {
			return nil, err
		}
		wait, again := l.repeat(req, resp, pause)
		if !again {
			return l.adapt(req, resp)
		}
		_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, maxManifest)) // to use the connection again
		_ = resp.Body.Close()
		select {
		case <-time.After(wait):
		case <-req.Context().Done():
			return nil, context.Cause(req.Context())
		}
	}
}

func (l link) send(req *http.Request) (*http.Response, error) {
	req, err := withoutSecrets(req)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancelCause(req.Context())
	if req = req.Clone(ctx); req.Header.Get("Accept-Encoding") != "" {
		req.Header.Set("Accept-Encoding", "gzip") // not zstd, see below
	}
	stalled := stalledError{method: req.Method, host: req.URL.Host, path: req.URL.Path, after: l.timeout, minimum: l.minRate}
	timer := time.AfterFunc(l.timeout, func() { cancel(stalled) })
	resp, err := l.base.RoundTrip(req)
	timer.Stop()
	if err != nil {
		err = cmp.Or(context.Cause(ctx), err)
		cancel(nil)
		return nil, err
	}
	switch content := strings.ToLower(resp.Header.Get("Content-Type")); {
	case !isBlob(req) && resp.StatusCode == http.StatusOK && resp.ContentLength > maxManifest:
		err = tooLong(req)
	case strings.Contains(strings.ToLower(resp.Header.Get("Content-Encoding")), "zstd"): // the library has no bound for its window
		err = fmt.Errorf("registry %s sends %s in the encoding zstd: %w", req.URL.Host, req.URL.Path, errdefs.ErrInvalidArgument)
	// A proxy that wants a login answers so. After an error the library asks the next host.
	case resp.StatusCode == http.StatusOK && strings.HasPrefix(content, "text/html") && (l.pull.isOwn(req.URL.Host) || !isBlob(req)) && req.Header.Get("Accept") != "" && req.Method != http.MethodHead:
		err = fmt.Errorf("%s returned a page of HTML, which no registry sends", req.URL.Host)
	}
	if err != nil {
		cancel(nil)
		return nil, errors.Join(err, resp.Body.Close())
	}
	body := &watchedBody{ReadCloser: resp.Body, ctx: ctx, cancel: cancel, timer: timer, stalled: stalled, left: math.MaxInt64}
	resp.Body = body
	switch {
	case resp.StatusCode >= http.StatusBadRequest && !l.pull.isOwn(req.URL.Host):
		body.left, body.after = 0, io.EOF // no error may show what another host says
	case !isBlob(req):
		body.left, body.after = maxManifest, tooLong(req)
	}
	return resp, nil
}

// withoutSecrets keeps a login from where a token service redirects it: no authorizer sees these requests.
func withoutSecrets(req *http.Request) (*http.Request, error) {
	if req.Response == nil || req.Header.Get("Accept") != "" || sameOrigin(req, firstOf(req)) {
		return req, nil
	}
	if req.Body != nil && req.Body != http.NoBody {
		return nil, fmt.Errorf("the token service %s redirects the login to %s, where it is not sent: %w", firstOf(req).URL.Host, req.URL.Host, errdefs.ErrPermissionDenied)
	}
	req = req.Clone(req.Context())
	keepPlainHeaders(req.Header)
	return req, nil
}

// firstOf is the request that was redirected to req.
func firstOf(req *http.Request) *http.Request {
	for req.Response != nil && req.Response.Request != nil {
		req = req.Response.Request
	}
	return req
}

func sameOrigin(a, b *http.Request) bool { return originOf(a) == originOf(b) }

// originOf returns host and port. The scheme only tells the port where none is named.
func originOf(req *http.Request) string {
	port := cmp.Or(req.URL.Port(), map[string]string{"http": "80", "https": "443"}[req.URL.Scheme])
	return net.JoinHostPort(strings.ToLower(req.URL.Hostname()), port)
}

// keepPlainHeaders removes headers that can hold a secret, such as those of hosts.toml.
func keepPlainHeaders(header http.Header) {
	for name := range header {
		switch http.CanonicalHeaderKey(name) {
		case "Accept", "Accept-Encoding", "Range", "User-Agent":
		default:
			delete(header, name) // not Del: names from hosts.toml are as written there
		}
	}
}

// blobKey marks the context of requests whose reader cuts the answer at a manifest's size.
type blobKey struct{}

// isBlob reports whether a request is for a blob, not for its token, which has no Accept.
func isBlob(req *http.Request) bool {
	return req.Context().Value(blobKey{}) != nil && req.Header.Get("Accept") != ""
}

func tooLong(req *http.Request) error {
	return fmt.Errorf("registry %s has more than %d bytes, too many for a manifest or a token (%s %s): %w",
		req.URL.Host, maxManifest, req.Method, req.URL.Path, errdefs.ErrInvalidArgument)
}

// watchedBody runs the timer, and measures the rate, only while a read waits.
type watchedBody struct {
	io.ReadCloser
	ctx     context.Context
	cancel  context.CancelCauseFunc
	timer   *time.Timer
	stalled stalledError // what to fail with
	left    int64        // bytes that may still be read
	after   error        // what a read says then

	waited time.Duration // in the window
	bytes  int64         // in the window
}

func (b *watchedBody) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, b.after
	}
	began := time.Now()
	b.timer.Reset(b.stalled.after)
	n, err := b.ReadCloser.Read(p)
	b.timer.Stop()
	b.left -= int64(n)
	switch {
	case err == nil:
		err = b.measure(n, time.Since(began))
	case context.Cause(b.ctx) != nil && !errors.Is(err, io.EOF):
		err = context.Cause(b.ctx) // in place of the bare "context canceled"
	case errors.Is(err, syscall.ECONNRESET):
		err = io.ErrUnexpectedEOF // for which the resolver goes on with another connection
	}
	return n, err
}

func (b *watchedBody) measure(n int, waited time.Duration) error {
	b.bytes += int64(n)
	b.waited += waited
	if b.waited < b.stalled.after {
		return nil
	}
	if float64(b.bytes) < float64(b.stalled.minimum)*b.waited.Seconds() {
		slow := b.stalled
		slow.bytes = b.bytes
		b.cancel(slow)
		return slow
	}
	b.waited, b.bytes = 0, 0
	return nil
}

func (b *watchedBody) Close() error {
	b.timer.Stop()
	b.cancel(nil)
	return b.ReadCloser.Close()
}
