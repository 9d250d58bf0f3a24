package client_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"
)

// Whatever an exec has started ends with it, at whatever moment it is ended.
func TestExecsAreEndedWithAllTheyStart(t *testing.T) {
	p := startPod(t)
	p.run("c", "sleep 1000")
	ctx := t.Context()
	for i := range 300 {
		id := fmt.Sprint("e", i)
		if err := p.ExecStart(ctx, "c", id, sh("sleep 1000 & sleep 1000"), true); err != nil {
			t.Fatal(err)
		}
		time.Sleep(rand.N(3 * time.Millisecond))
		if err := p.ExecKill(ctx, "c", id, 9, true); err != nil {
			t.Error(err)
		}
		if _, err := p.ExecWait(ctx, "c", id); err != nil {
			t.Error(err)
		}
	}
	var left []string
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); {
		if left = p.processes("c"); len(left) == 1 {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Errorf("left: %d processes of 300 execs", len(left)-1)
}
