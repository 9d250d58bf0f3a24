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
		token, err := r.add(func(*session, *upgrade) {})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(tokenLife - time.Second)
		if _, err := r.add(nil); !errors.Is(err, errdefs.ErrResourceExhausted) {
			t.Errorf("a second request of one: %v", err)
		}
		time.Sleep(2 * time.Second)
		if r.take(token) != nil {
			t.Error("a token works after its time")
		}
		token, err = r.add(func(*session, *upgrade) {})
		if err != nil {
			t.Fatalf("an expired request still counts: %v", err)
		}
		if r.take(token) == nil || r.take(token) != nil {
			t.Error("a token has to work once")
		}
		r.done()
		r.close()
		if _, err := r.add(nil); !errors.Is(err, errdefs.ErrUnavailable) {
			t.Errorf("after the end: %v", err)
		}
	})
}
