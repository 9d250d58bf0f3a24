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
		r.close()
		if _, err := r.add(request{}); !errors.Is(err, errdefs.ErrUnavailable) {
			t.Errorf("after the end: %v", err)
		}
	})
}

// At the limit the session that has been silent longest makes room, but none
// that has not been silent for a minute.
func TestSilentSessionsMakeRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRequests(2)
		var lost []string
		open := func(name string) *session {
			s := &session{lost: func() { lost = append(lost, name) }}
			s.touch()
			if !r.begin(s) {
				t.Fatal("no session may begin")
			}
			return s
		}
		oldest, newer := open("oldest"), open("newer")
		time.Sleep(idleGrace - time.Second)
		if _, err := r.add(request{}); !errors.Is(err, errdefs.ErrResourceExhausted) {
			t.Errorf("a third session of two: %v", err)
		}
		newer.touch()
		time.Sleep(2 * time.Second)
		token, err := r.add(request{})
		if err != nil || len(lost) != 1 || lost[0] != "oldest" {
			t.Fatalf("for a third session %q made room (%v)", lost, err)
		}
		if _, err := r.add(request{}); !errors.Is(err, errdefs.ErrResourceExhausted) {
			t.Errorf("a fourth session of two: %v", err)
		}
		r.take(token)
		r.end(oldest)
		r.end(newer)
		r.close() // waits for sessions that have not ended
	})
}
