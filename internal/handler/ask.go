package handler

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go/features"
	"golang.org/x/sys/unix"
)

// questions are what programs are asked, each once at a time.
type questions struct {
	mu    sync.Mutex
	asked map[string]*question // by what a program is asked, and the program
}

func newQuestions() questions { return questions{asked: make(map[string]*question)} }

// question is one run of a program that says what it is, or shows what it does. The
// answer counts as long as its file is the same; an error counts for errorLife.
type question struct {
	file     fs.FileInfo
	done     chan struct{} // closed when what follows is set
	features Features
	err      error
	at       time.Time
}

const (
	// askLimit bounds a run of a runtime that only has to say what it is.
	askLimit = 5 * time.Second
	// errorLife is how long a program that could not be asked is not asked again:
	// the kubelet asks for the status every few seconds.
	errorLife = 15 * time.Second
	// mostSaid is how much of its answer is taken, in bytes.
	mostSaid = 1 << 20
)

// ask returns the features of a handler's program. It waits no longer than ctx;
// the program continues until askLimit, and its answer is there for the next caller.
func (q *questions) ask(ctx context.Context, of Spec) (Features, error) {
	path := of.Program[0]
	asked, err := q.find(path, path, func() (Features, error) { return askFeatures(path) })
	if err != nil {
		return Features{}, err
	}
	select {
	case <-asked.done:
		return asked.features, asked.err
	case <-ctx.Done():
		return Features{}, fmt.Errorf("%s has not yet said what it can do: %w", path, context.Cause(ctx))
	}
}

// prove returns nil if try has succeeded with the handler's program.
func (q *questions) prove(ctx context.Context, of Spec, try func([]string) error) error {
	asked, err := q.find("try "+strings.Join(of.Program, " "), of.Program[0], func() (Features, error) { return Features{}, try(of.Program) })
	if err != nil {
		return err
	}
	select {
	case <-asked.done:
		return asked.err
	case <-ctx.Done():
		return fmt.Errorf("%s has not yet made a container on trial: %w", of.Program[0], context.Cause(ctx))
	}
}

// find returns the question that was asked last, or asks anew. answer returns within a
// limit of its own.
func (q *questions) find(key, path string, answer func() (Features, error)) (*question, error) {
	file, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("its runtime is not there: %w", err)
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if last := q.asked[key]; last != nil && last.counts(file) {
		return last, nil
	}
	asked := &question{file: file, done: make(chan struct{})}
	q.asked[key] = asked
	go func() { // ends with answer
		defer close(asked.done)
		asked.features, asked.err = answer()
		asked.at = time.Now()
	}()
	return asked, nil
}

func (a *question) counts(file fs.FileInfo) bool {
	if !os.SameFile(a.file, file) || !a.file.ModTime().Equal(file.ModTime()) || a.file.Size() != file.Size() {
		return false
	}
	select {
	case <-a.done:
		return a.err == nil || time.Since(a.at) < errorLife
	default:
		return true
	}
}

// askFeatures runs "PROGRAM features" (runtime-spec, features.md). Runtimes
// that do not have it yet can still run: they have to have a version then, and
// count as those that can do nothing beyond the rest.
func askFeatures(path string) (Features, error) {
	said, err := run(path, "features")
	var parsed features.Features
	if err == nil && json.Unmarshal(said, &parsed) == nil && parsed.OCIVersionMin != "" {
		return fromSpec(&parsed), nil
	}
	_, err = run(path, "--version")
	return Features{}, err
}

// run runs a program within askLimit and returns what it says; what it has started
// and left with its output is not waited for. It ends with us, also if we are killed:
// by PR_SET_PDEATHSIG, for which the goroutine keeps its thread.
func run(path, argument string) ([]byte, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ctx, cancel := context.WithTimeout(context.Background(), askLimit)
	defer cancel()
	var said, complained limited
	command := exec.CommandContext(ctx, path, argument)
	command.Stdout, command.Stderr = &said, &complained
	command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
	command.WaitDelay = askLimit // that long its output is read to the end
	err := command.Run()
	switch {
	case errors.Is(err, exec.ErrWaitDelay): // it has ended well, and left its output to another
		return said, nil
	case ctx.Err() != nil:
		return nil, fmt.Errorf("%s %s: no answer within %v", path, argument, askLimit)
	case err != nil && len(complained)+len(said) == 0:
		return nil, fmt.Errorf("%s %s: %w", path, argument, err)
	case err != nil:
		return nil, fmt.Errorf("%s %s: %w: %.200q", path, argument, err, slices.Concat(complained, said))
	}
	return said, nil
}

// limited takes all that is written and keeps the first mostSaid bytes.
type limited []byte

// Write implements io.Writer.
func (l *limited) Write(p []byte) (int, error) {
	*l = append(*l, p[:min(len(p), mostSaid-len(*l))]...)
	return len(p), nil
}

func fromSpec(f *features.Features) Features {
	can := Features{RecursiveReadOnlyMounts: slices.Contains(f.MountOptions, "rro")}
	if f.Linux == nil {
		return can
	}
	can.MemoryPolicy = f.Linux.MemoryPolicy != nil && len(f.Linux.MemoryPolicy.Modes) > 0
	if devices := f.Linux.NetDevices; devices != nil {
		can.NetDevices = devices.Enabled != nil && *devices.Enabled
	}
	if f.Linux.MountExtensions != nil && f.Linux.MountExtensions.IDMap != nil {
		idmap := f.Linux.MountExtensions.IDMap.Enabled
		can.UserNamespaces = idmap != nil && *idmap && slices.Contains(f.Linux.Namespaces, "user")
	}
	return can
}
