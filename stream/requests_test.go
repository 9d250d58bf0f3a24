package stream

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/test/harness"
)

// A token is good for one use and one minute, and makes room for another then.
func TestTokenExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRequests(1)
		token, err := r.add(request{kind: kindExec})
		harness.Check(t, err)
		time.Sleep(tokenLife - time.Second)
		_, err = r.add(request{})
		harness.Want(t, errors.Is(err, errdefs.ErrResourceExhausted), "a second request of one: %v", err)
		time.Sleep(2 * time.Second)
		_, found := r.take(token)
		harness.Want(t, !found, "a token works after its time")
		token, err = r.add(request{kind: kindAttach})
		harness.Want(t, err == nil, "an expired request still counts: %v", err)
		got, found := r.take(token)
		harness.Want(t, found && got.kind == kindAttach, "the token stands for %v", got)
		_, found = r.take(token)
		harness.Want(t, !found, "a token has to work once")
		_, err = r.add(request{})
		harness.Want(t, errors.Is(err, errdefs.ErrResourceExhausted), "a second session of one: %v", err)
		r.end()
		r.close()
		_, err = r.add(request{})
		harness.Want(t, errors.Is(err, errdefs.ErrUnavailable), "after the end: %v", err)
	})
}
