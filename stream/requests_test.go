package stream

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"

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

// attack: clients: a session with a terminal sends sizes as fast as it can
// held: of what has come the last one is set, and none of the others
// field: containerd and CRI-O decode and set every one
func TestLastSize(t *testing.T) {
	for text, want := range map[string]struct {
		size *remotecommand.TerminalSize
		rest string
	}{
		``:                                {nil, ""},
		`{"Width":80,"Height":24}` + "\n": {&remotecommand.TerminalSize{Width: 80, Height: 24}, "\n"},
		`{"Width":1,"Height":2}{"Width":3,"Height":4`: {&remotecommand.TerminalSize{Width: 1, Height: 2}, `{"Width":3,"Height":4`},
		`"Height":9}{"Width":3,"Height":4}`:           {&remotecommand.TerminalSize{Width: 3, Height: 4}, ""},
		`no size}`:                                    {nil, ""},
		`{"Width":"wide"}{`:                           {nil, "{"},
		`{"Width":70000}`:                             {nil, ""},
	} {
		size, rest := lastSize([]byte(text))
		harness.Want(t, fmt.Sprint(size) == fmt.Sprint(want.size) && string(rest) == want.rest,
			"%q: %v and %q, want %v and %q", text, size, rest, want.size, want.rest)
	}
	_, rest := lastSize(make([]byte, 1<<20))
	harness.Want(t, len(rest) == largestSize, "%d bytes are kept", len(rest))
}
