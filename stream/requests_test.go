package stream

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
)

// A token is good for one use and one minute, and makes room for another then.
func TestTokenExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRequests(1)
		token, err := r.add(request{kind: kindExec})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(tokenLife - time.Second)
		if _, err := r.add(request{}); !errors.Is(err, errdefs.ErrResourceExhausted) {
			t.Errorf("a second request of one: %v", err)
		}
		time.Sleep(2 * time.Second)
		if _, found := r.take(token); found {
			t.Error("a token works after its time")
		}
		token, err = r.add(request{kind: kindAttach})
		if err != nil {
			t.Fatalf("an expired request still counts: %v", err)
		}
		if got, found := r.take(token); !found || got.kind != kindAttach {
			t.Errorf("the token stands for %v", got)
		}
		if _, found := r.take(token); found {
			t.Error("a token has to work once")
		}
		if _, err := r.add(request{}); !errors.Is(err, errdefs.ErrResourceExhausted) {
			t.Errorf("a second session of one: %v", err)
		}
		r.end()
		r.close()
		if _, err := r.add(request{}); !errors.Is(err, errdefs.ErrUnavailable) {
			t.Errorf("after the end: %v", err)
		}
	})
}
