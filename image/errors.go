package image

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/containerd/v2/core/remotes/docker/auth"
	remoteerrors "github.com/containerd/containerd/v2/core/remotes/errors"
	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/internal/redact"
)

// ErrRegistryUnavailable: the registry could not be reached, stopped answering or
// reported a failure of its own. It is an errdefs.ErrUnavailable.
var ErrRegistryUnavailable error = kindError{"registry unavailable", errdefs.ErrUnavailable}

// ErrVerification: a configured verifier did not accept the image. It is an
// errdefs.ErrPermissionDenied.
var ErrVerification error = kindError{"image verification failed", errdefs.ErrPermissionDenied}

// kindError is an error of a kind of errdefs whose text does not repeat the kind's.
type kindError struct {
	text string
	kind error
}

func (e kindError) Error() string { return e.text }
func (e kindError) Unwrap() error { return e.kind }

// registryError gives what went wrong with a registry its kind and keeps the
// registry's own words.
func registryError(ctx context.Context, err error) error {
	if errors.Is(err, context.Canceled) && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if status, ok := errors.AsType[remoteerrors.ErrUnexpectedStatus](err); ok {
		return statusError(status)
	}
	if isBadToken(err) {
		return fmt.Errorf("the registry's token service answered with something that is no token: %w", errdefs.ErrUnauthenticated)
	}
	if errors.Is(err, docker.ErrInvalidAuthorization) || errors.Is(err, auth.ErrNoToken) {
		return fmt.Errorf("%w: %w", err, errdefs.ErrUnauthenticated)
	}
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return fmt.Errorf("%w: %w", err, errdefs.ErrResourceExhausted)
	}
	if unreachable(err) && !errdefs.IsInvalidArgument(err) && !errdefs.IsPermissionDenied(err) {
		text := err.Error()
		if request, ok := errors.AsType[*url.Error](err); ok {
			text = strings.ReplaceAll(text, request.URL, withoutQuery(request.URL))
		}
		return fmt.Errorf("%w: %s", ErrRegistryUnavailable, text)
	}
	return err
}

// unreachable looks for the errors of the HTTP client and of connections. Asking
// for net.Error would take every error of a system call, of the disk's too.
func unreachable(err error) bool {
	_, stalled := errors.AsType[stalledError](err)
	_, request := errors.AsType[*url.Error](err)
	_, connection := errors.AsType[*net.OpError](err)
	return stalled || request || connection || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET)
}

// statusError is written anew: the library's text has the whole address, whose
// query holds signatures where registries redirect to signed addresses, and
// leaves out words that are not in the registry's error format.
func statusError(e remoteerrors.ErrUnexpectedStatus) error {
	kind, known := map[int]error{
		http.StatusUnauthorized: errdefs.ErrUnauthenticated, http.StatusForbidden: errdefs.ErrPermissionDenied,
		http.StatusNotFound: errdefs.ErrNotFound, http.StatusTooManyRequests: errdefs.ErrResourceExhausted,
	}[e.StatusCode]
	switch {
	case e.StatusCode >= 500:
		kind = ErrRegistryUnavailable
	case !known:
		kind = errdefs.ErrUnknown
	}
	text := fmt.Sprintf("%s %s: %s", e.RequestMethod, withoutQuery(e.RequestURL), cut(e.Status, 100))
	var registry docker.Errors
	words := strings.Join(strings.Fields(string(e.Body)), " ")
	if err := registry.UnmarshalJSON(e.Body); err == nil && registry.Len() > 0 {
		words = registry.Error()
	}
	if words != "" {
		text += ": " + cut(words, maxWords)
	}
	return fmt.Errorf("%s: %w", text, kind)
}

const (
	// maxWords bounds how much of an answer goes into an error, in bytes.
	maxWords = 300
	// maxText bounds the text of an error of a pull, in bytes: it becomes an event
	// of the pod. With what callers put before it, it is less than 1 KiB.
	maxText = 900
)

// cut shortens a text that others have written.
func cut(text string, most int) string {
	if len(text) <= most {
		return text
	}
	return text[:most] + "..."
}

// pullError is an error whose text is fit to be shown: of bounded length, and
// without control characters, whatever the registry or the image had in it.
type pullError struct{ error }

func (e pullError) Error() string {
	text := strings.ReplaceAll(redact.Printable(e.error.Error()), "\n", " ")
	return strings.ToValidUTF8(cut(text, maxText), "")
}

func (e pullError) Unwrap() error { return e.error }

// isBadToken reports that a token service answered something else. The registry chose
// the service, and it may be any address of the node's network: the decoder's errors
// quote the answer.
func isBadToken(err error) bool {
	_, syntax := errors.AsType[*json.SyntaxError](err)
	_, kind := errors.AsType[*json.UnmarshalTypeError](err)
	_, date := errors.AsType[*time.ParseError](err)
	return strings.Contains(err.Error(), "token response") && (syntax || kind || date)
}

func withoutQuery(address string) string {
	u, err := url.Parse(address)
	if err != nil {
		return "registry"
	}
	return (&url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path}).String()
}
