package inspect

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// A lock that is not released stops the pings; when it is released they continue.
func TestWedgedLockStopsThePing(t *testing.T) {
	var mu sync.Mutex
	var pings atomic.Int64
	probes := map[string]func(){"fine": func() {}, "pods": func() { mu.Lock(); defer mu.Unlock() }}
	ctx, cancel := context.WithCancel(t.Context())
	var log lockedBuffer
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		Watch(ctx, probes, 50*time.Millisecond, func() { pings.Add(1) }, slog.New(slog.NewTextHandler(&log, nil)))
	}()
	await := func(what string, holds func() bool) {
		t.Helper()
		for deadline := time.Now().Add(time.Minute); !holds(); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal(what)
			}
		}
	}
	await("no ping", func() bool { return pings.Load() > 2 })
	mu.Lock()
	await("nothing is said of the lock", func() bool { return strings.Contains(log.String(), "probe=pods") })
	before := pings.Load()
	time.Sleep(200 * time.Millisecond)
	if after := pings.Load(); after != before {
		t.Errorf("%d pings while the lock is held", after-before)
	}
	if !strings.Contains(log.String(), "TestWedgedLockStopsThePing") {
		t.Error("the stacks are not in the log")
	}
	mu.Unlock()
	await("no ping after the lock is free", func() bool { return pings.Load() > before })
	cancel()
	<-ended
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
