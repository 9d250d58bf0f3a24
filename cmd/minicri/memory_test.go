package main

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/filepages"
)

// The pages of the program that calls have touched are given back, also when they have
// left no garbage.
func TestPagesAreReturned(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		returnMemory(ctx)
		close(done)
	}()
	defer func() {
		cancel()
		<-done
	}()
	pages := filepages.Find()
	few := func(when string) {
		t.Helper()
		for deadline := time.Now().Add(2 * time.Minute); pages.Resident() > mostPages; time.Sleep(100 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%s: %d bytes of the program stay in memory", when, pages.Resident())
			}
		}
	}
	few("after the start") // after which garbage is looked for once more
	for range 3 {
		time.Sleep(memoryLook + memoryLook/4)
		runtime.GC()
		before := pages.Resident()
		touchProgram(t)
		if now := pages.Resident(); now <= mostPages {
			t.Fatalf("%d bytes of the program are in memory, %d before: this shows nothing", now, before)
		}
		few("after all of it was touched")
	}
}

// touchProgram brings the whole program into our memory.
func touchProgram(t *testing.T) {
	t.Helper()
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(maps)) {
		var start, end uintptr
		if _, err := fmt.Sscanf(line, "%x-%x r", &start, &end); err != nil || !strings.HasSuffix(line, self+"\n") {
			continue
		}
		if _, _, errno := unix.Syscall(unix.SYS_MADVISE, start, end-start, unix.MADV_POPULATE_READ); errno != 0 {
			t.Fatal(errno)
		}
	}
}
