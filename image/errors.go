package image

import (
	"cmp"
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

// ErrRegistryUnavailable says that the registry could not be reached, stopped answering
// or failed. It is an errdefs.ErrUnavailable.
var ErrRegistryUnavailable error = kindError{"registry unavailable", errdefs.ErrUnavailable}

// ErrVerification says that a verifier did not accept the image. It is an errdefs.ErrPermissionDenied.
var ErrVerification error = kindError{"image verification failed", errdefs.ErrPermissionDenied}

type kindError struct {
	text string
	kind error
}

func (e kindError) Error() string { return e.text }
func (e kindError) Unwrap() error { return e.kind }

// registryError gives an error of a registry its kind and keeps the registry's words.
func registryError(ctx context.Context, err error) error {
	status, isStatus := errors.AsType[remoteerrors.ErrUnexpectedStatus](err)
	switch {
	case errors.Is(err, context.Canceled) && ctx.Err() != nil:
		return context.Cause(ctx)
	case isStatus:
		return statusError(status)
	case isBadToken(err):
		return fmt.Errorf("the registry's token service answered with something that is no token: %w", errdefs.ErrUnauthenticated)
	case errors.Is(err, docker.ErrInvalidAuthorization), errors.Is(err, auth.ErrNoToken):
		return fmt.Errorf("%w: %w", err, errdefs.ErrUnauthenticated)
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return fmt.Errorf("%w: %w", err, errdefs.ErrResourceExhausted)
	}
	_, stalled := errors.AsType[stalledError](err)
	_, connection := errors.AsType[*net.OpError](err) // not net.Error, which errors of the disk are too
	request, isRequest := errors.AsType[*url.Error](err)
	broken := stalled || connection || isRequest || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET)
	if broken && !errdefs.IsInvalidArgument(err) && !errdefs.IsPermissionDenied(err) {
		text := err.Error()
		if isRequest {
			text = strings.ReplaceAll(text, request.URL, withoutQuery(request.URL))
		}
		return fmt.Errorf("%w: %s", ErrRegistryUnavailable, text)
	}
	return err
}

// statusError replaces the library's text, which has the signatures in an address's query
// and lacks answers that are not in the registry's error format.
func statusError(e remoteerrors.ErrUnexpectedStatus) error {
	kind := cmp.Or[error](map[int]error{
		http.StatusUnauthorized: errdefs.ErrUnauthenticated, http.StatusForbidden: errdefs.ErrPermissionDenied,
		http.StatusNotFound: errdefs.ErrNotFound, http.StatusTooManyRequests: errdefs.ErrResourceExhausted,
	}[e.StatusCode], errdefs.ErrUnknown)
	if e.StatusCode >= 500 {
		kind = ErrRegistryUnavailable
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
	maxWords = 300 // bytes of an answer in an error
	maxText  = 900 // bytes of a pull's error: with what callers add, an event of the pod, of 1 KiB
)

func cut(text string, most int) string {
	if len(text) <= most {
		return text
	}
	return text[:most] + "..."
}

// pullError bounds an error's text and drops the control characters in it.
type pullError struct{ error }

func (e pullError) Error() string {
	text := strings.ReplaceAll(redact.Printable(e.error.Error()), "\n", " ")
	return strings.ToValidUTF8(cut(text, maxText), "")
}

func (e pullError) Unwrap() error { return e.error }

// isBadToken reports that a token service answered something else. The decoder's error
// quotes the answer, and the registry may have chosen any service of the node's network.
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
