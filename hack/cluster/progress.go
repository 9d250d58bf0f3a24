package main

import (
	"fmt"
	"io"
	"sync"
	"time"
)

// progress prints what a command does with its time.
type progress struct {
	output io.Writer
	begun  time.Time

	mu   sync.Mutex
	last time.Time
}

func newProgress(output io.Writer) *progress {
	now := time.Now()
	return &progress{output: output, begun: now, last: now}
}

// did prints a step that has ended, how long it took, and the time since the
// command began.
func (p *progress) did(format string, arguments ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	fmt.Fprintf(p.output, "%6.1fs  +%5.1fs  %s\n", now.Sub(p.begun).Seconds(), now.Sub(p.last).Seconds(), fmt.Sprintf(format, arguments...))
	p.last = now
}
