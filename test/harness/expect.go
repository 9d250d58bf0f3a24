// Package harness has what every test may use: checks that name the lines that led to them, files, mounts and
// processes. It imports the standard library, golang.org/x/sys and internal/process, so that the test of a leaf
// package links nothing else. Package nodetest makes nodes with a daemon.
package harness

import (
	"bytes"
	"context"
	"fmt"
	"iter"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// Callers returns the lines of tests on the stack where they are several, for the message of a check: a function
// of a test that checks needs no t.Helper.
func Callers() string {
	var lines []string
	pcs, others := make([]uintptr, 64), false
	frames := runtime.CallersFrames(pcs[:runtime.Callers(2, pcs)])
	for f, more := frames.Next(); more; f, more = frames.Next() {
		name := filepath.Base(f.File)
		switch {
		case strings.HasSuffix(name, "_test.go"):
			lines = append(lines, fmt.Sprint(name, ":", f.Line))
		case name != "expect.go" && !strings.HasPrefix(f.Function, "testing."):
			others = true
		}
	}
	if len(lines) < 2 && !others {
		return ""
	}
	return " (by " + strings.Join(lines, ", ") + ")"
}

// Check ends the test with the error, if there is one.
func Check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%v%s", err, Callers())
	}
}

// Same fails the test, which goes on, unless two values are the same.
func Same[T any](t testing.TB, what string, got, want T) {
	t.Helper()
	if !same(got, want) {
		t.Errorf("%s: want %q, got %q: %#v%s", what, fmt.Sprint(want), fmt.Sprint(got), got, Callers())
	}
}

// protoMessage is a message of protobuf, named by its methods: importing protobuf would link it into every test.
type protoMessage interface {
	ProtoMessage()
	String() string
}

// same compares messages by what they say. No list and an empty one are the same; the lists [] and [""],
// which print alike, are not.
func same(got, want any) bool {
	if message, is := got.(protoMessage); is {
		other, _ := want.(protoMessage)
		return other != nil && message.String() == other.String()
	}
	if g, w := reflect.ValueOf(got), reflect.ValueOf(want); g.Kind() == reflect.Slice && g.Len()+w.Len() == 0 {
		return true
	}
	return reflect.DeepEqual(got, want)
}

// Want fails the test, which goes on, unless what it expects holds.
func Want(t testing.TB, holds bool, format string, args ...any) {
	t.Helper()
	if !holds {
		t.Errorf("%s%s", fmt.Sprintf(format, args...), Callers())
	}
}

// Need ends the test unless what it expects holds.
func Need(t testing.TB, holds bool, format string, args ...any) {
	t.Helper()
	if !holds {
		t.Fatalf("%s%s", fmt.Sprintf(format, args...), Callers())
	}
}

// Read is what a file has.
func Read(t testing.TB, path string) []byte {
	t.Helper()
	content, err := os.ReadFile(path)
	Check(t, err)
	return content
}

// Glob are the paths that match a pattern, joined of parts.
func Glob(t testing.TB, parts ...string) []string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(parts...))
	Check(t, err)
	return found
}

// Sorted are the cases of a table, by name: a map has another order in each run.
func Sorted[Case any](table map[string]Case) iter.Seq2[string, Case] {
	return func(yield func(string, Case) bool) {
		for _, name := range slices.Sorted(maps.Keys(table)) {
			if !yield(name, table[name]) {
				return
			}
		}
	}
}

// WantError fails the test, which goes on, unless there is an error that says all this.
func WantError(t testing.TB, err error, says ...string) {
	t.Helper()
	Want(t, err != nil && !slices.ContainsFunc(says, func(text string) bool { return !strings.Contains(err.Error(), text) }),
		"want an error that says %q, got: %.2000v", says, err)
}

// Limited is a context for calls of a test. It ends with the test, or when Eventually would give up. It is no
// child of the test's own context, so that cleanups may use it.
func Limited(t testing.TB) context.Context {
	ctx, cancel := context.WithDeadline(context.Background(), deadline(t))
	t.Cleanup(cancel)
	return ctx
}

// deadline is the test's own time-out (go test -timeout), less a tenth for the message and the cleanups. No test has
// another bound: a busy machine makes a test slow, and a slow test has not failed.
func deadline(t testing.TB) time.Time {
	if d, ok := t.(interface{ Deadline() (time.Time, bool) }); ok {
		if end, ok := d.Deadline(); ok {
			return time.Now().Add(time.Until(end) * 9 / 10)
		}
	}
	return time.Now().Add(24 * time.Hour)
}

// pollInterval is how often Eventually asks.
const pollInterval = 5 * time.Millisecond

// Eventually polls until the condition holds, and ends the test if it does not before the test's own time-out.
func Eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for end := deadline(t); !holds(); time.Sleep(pollInterval) {
		if time.Now().After(end) {
			t.Fatalf("it did not become true that %s%s", what, Callers())
		}
	}
}

// AllSteps fails the test if a source file names a step that the lists, by operation, lack.
func AllSteps[S ~string](t testing.TB, file string, lists map[string][]S) {
	t.Helper()
	named := regexp.MustCompile(`step\.Name = "([^"]+)"`).FindAllSubmatch(Read(t, file), -1)
	Need(t, len(named) > 0, "%s names no steps", file)
	for _, one := range named {
		listed := slices.ContainsFunc(slices.Collect(maps.Values(lists)), func(list []S) bool {
			return slices.Contains(list, S(one[1]))
		})
		Want(t, listed, "the step %s of %s is in no list", one[1], file)
	}
}

// Buffer may be read while it is written.
type Buffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

// Write is of io.Writer.
func (b *Buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *Buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// Len is the length of String, which costs a copy.
func (b *Buffer) Len() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Len()
}
