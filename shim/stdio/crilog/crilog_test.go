package crilog

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/cri-client/pkg/logs"
)

// kubeletReads gives back what the kubelet's reader makes of a log.
func kubeletReads(t *testing.T, path string) (stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	if err := logs.ReadLogs(context.Background(), path, "", &logs.LogOptions{}, nil, &out, &errs); err != nil {
		t.Fatal(err)
	}
	return out.String(), errs.String()
}

func TestKubeletReadsWhatWasWritten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "0.log")
	log, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	for i := range 2000 {
		fmt.Fprintf(&text, "%d %s\n", i, strings.Repeat("x", rand.IntN(5)*rand.IntN(9000)))
	}
	for _, n := range []int{MaxLine - 1, MaxLine, MaxLine + 1, 2 * MaxLine, 2*MaxLine + 1, 0} {
		text.WriteString(strings.Repeat("y", n) + "\n")
	}
	text.WriteString("no newline at the end")
	writeInPieces(log.Stream("stdout"), text.String())
	writeInPieces(log.Stream("stderr"), "oops\n")
	if err := log.Close(); err != nil {
		t.Fatal(err)
	}

	stdout, stderr := kubeletReads(t, path)
	if want := text.String() + "\n"; stdout != want {
		t.Errorf("stdout differs: %d bytes, want %d", len(stdout), len(want))
	}
	if stderr != "oops\n" {
		t.Errorf("stderr %q", stderr)
	}
	for _, line := range readLines(t, path) {
		if fields := strings.SplitN(line, " ", 4); len(fields) != 4 || len(fields[3]) > MaxLine {
			t.Fatalf("entry %.80q is not in the format or longer than %d", line, MaxLine)
		}
	}
}

// TestReopenLosesNothing is property 39: lines written across many rotations
// are each in exactly one file, in order.
func TestReopenLosesNothing(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "0.log")
	log, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	const lines = 400_000
	done := make(chan struct{})
	go func() {
		defer close(done)
		stream := log.Stream("stdout")
		for i := range lines {
			fmt.Fprintf(stream, "%d\n", i)
		}
		stream.Flush()
	}()
	rotations := 0
	for running := true; running; rotations++ {
		if err := os.Rename(path, fmt.Sprintf("%s/%06d", dir, rotations)); err != nil {
			t.Fatal(err)
		}
		if err := log.Reopen(); err != nil {
			t.Fatal(err)
		}
		select {
		case <-done:
			running = false
		case <-time.After(time.Millisecond):
		}
	}
	if err := log.Close(); err != nil {
		t.Fatal(err)
	}
	next := 0
	for i := range rotations {
		next = wantLines(t, fmt.Sprintf("%s/%06d", dir, i), next)
	}
	if next = wantLines(t, path, next); next != lines {
		t.Errorf("%d lines after %d rotations, want %d", next, rotations, lines)
	}
	if rotations < 10 {
		t.Errorf("only %d rotations: too few to prove anything", rotations)
	}
}

// wantLines checks that a log's lines count on from next.
func wantLines(t *testing.T, path string, next int) int {
	t.Helper()
	for _, line := range readLines(t, path) {
		if !strings.HasSuffix(line, fmt.Sprintf(" F %d", next)) {
			t.Fatalf("%s: line %q, want number %d", path, line, next)
		}
		next++
	}
	return next
}

// TestDiskFull fills a small tmpfs, frees it, and looks for the notice.
func TestDiskFull(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatalf("mount a small tmpfs (needs root): %v", err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
	path := filepath.Join(dir, "0.log")
	log, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	stream := log.Stream("stdout")
	for i := range 5000 {
		fmt.Fprintf(stream, "line %d\n", i)
	}
	kept := len(readLines(t, path))
	if kept == 0 || kept >= 5000 {
		t.Fatalf("%d lines fit, want some but not all", kept)
	}
	if err := os.Rename(path, path+".old"); err != nil {
		t.Fatal(err)
	}
	for _, line := range readLines(t, path+".old") {
		if !strings.Contains(line, " F line ") {
			t.Fatalf("torn entry %q", line)
		}
	}
	if err := os.Remove(path + ".old"); err != nil {
		t.Fatal(err)
	}
	if err := log.Reopen(); err != nil {
		t.Fatal(err)
	}
	fmt.Fprintln(stream, "space again")
	lines := readLines(t, path)
	notice := fmt.Sprintf("minicri: %d log lines", 5000-kept)
	if len(lines) != 2 || !strings.Contains(lines[0], notice) || !strings.HasSuffix(lines[1], "space again") {
		t.Errorf("log after the disk had space again: %q, want %q first", lines, notice)
	}
}

func TestReopenFailureKeepsTheFile(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "pod")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	log, err := Open(filepath.Join(dir, "0.log"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(dir, dir+".old"); err != nil {
		t.Fatal(err)
	}
	if err := log.Reopen(); err == nil {
		t.Fatal("Reopen succeeded without the directory")
	}
	fmt.Fprintln(log.Stream("stdout"), "still here")
	if lines := readLines(t, dir+".old/0.log"); len(lines) != 1 {
		t.Errorf("log %q, want one line", lines)
	}
}

func BenchmarkWrite(b *testing.B) {
	log, err := Open(filepath.Join("/dev/shm", fmt.Sprintf("minicri-crilog-%d", os.Getpid())))
	if err != nil {
		b.Fatal(err)
	}
	defer os.Remove(log.path)
	chunk := []byte(strings.Repeat(strings.Repeat("x", 99)+"\n", 655))
	stream := log.Stream("stdout")
	b.SetBytes(int64(len(chunk)))
	for i := 0; b.Loop(); i++ {
		if i%1000 == 0 {
			_ = log.file.Truncate(0)
		}
		_, _ = stream.Write(chunk)
	}
}

func writeInPieces(s *Stream, text string) {
	for len(text) > 0 {
		n := min(1+rand.IntN(40_000), len(text))
		_, _ = s.Write([]byte(text[:n]))
		text = text[n:]
	}
	s.Flush()
}

func readLines(t *testing.T, path string) []string {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if len(content) == 0 {
		return nil
	}
	return strings.Split(strings.TrimSuffix(string(content), "\n"), "\n")
}
