// Package handler knows the runtime handlers of this node: what runs the
// containers of each, whether it is there, and what it can do.
//
// A handler of type builtin is libcontainer in minicri-shim; one of type oci is
// a program with runc's command line, asked for its features by its own verb
// "features", and to make a container on trial before it is listed as one that can run
// pods. What a program has said is kept until its file changes; one that could not be
// asked is asked again after a while. A Set has a lock, which is not held while a
// program is asked; all programs are asked concurrently, and List does not wait
// for one that hangs.
package handler

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go/features"
	"golang.org/x/sys/unix"
)

// Spec is what the configuration says of a handler.
type Spec struct {
	// Name is that of the handler which "" stands for, in the Spec of "" alone.
	Name string
	// Program is the path and the global flags of a runtime; none for
	// libcontainer.
	Program []string
	// CNIConf is the directory of its networks, "" for the node's.
	CNIConf string
	// OwnSandbox: each container has a sandbox of the runtime's own.
	OwnSandbox bool
}

// Features are what a handler's runtime can do.
type Features struct {
	RecursiveReadOnlyMounts bool `json:"recursive_read_only_mounts"`
	UserNamespaces          bool `json:"user_namespaces"`
	// NetDevices is moving network devices into containers.
	NetDevices   bool `json:"net_devices"`
	MemoryPolicy bool `json:"memory_policy"`
}

// Status is a handler as it is now.
type Status struct {
	Spec // with the handler's name
	Features
	// Err says why the handler cannot run pods.
	Err error
}

// Set are the handlers of this node.
type Set struct {
	builtin Features

	mu    sync.Mutex                   // guards what follows
	specs map[string]Spec              // replaced, never changed
	try   func(program []string) error // nil before ProveBy
	asked map[string]*question         // by what a program is asked, and the program
}

// New returns the handlers of a configuration, and "", which is builtin. The
// features of libcontainer are those of the machine.
func New(specs map[string]Spec, builtin Features) *Set {
	return &Set{builtin: builtin, specs: specs, asked: make(map[string]*question)}
}

// Replace puts other handlers in the place of all but "". Pods that run keep the
// name of theirs.
func (s *Set) Replace(specs map[string]Spec) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.specs = specs
}

// ProveBy has List say of a program that it cannot run pods unless try succeeds with its path
// and flags. try is called once at a time for each program, again when its file has changed and
// some time after a failure, and has a limit of its own. Find does not wait for it.
func (s *Set) ProveBy(try func(program []string) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.try = try
}

// all are the specs by name; a nil Set has none.
func (s *Set) all() map[string]Spec {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.specs
}

// Names are the handlers besides "", sorted; a nil Set has none.
func (s *Set) Names() []string {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(s.all())), func(name string) bool { return name == "" })
}

// Builtin is the name of libcontainer where no other handler stands for "". No handler
// of a configuration can have it.
const Builtin = "(builtin)"

// Default is the name of the handler that "" stands for now: who keeps it has the same
// handler after Replace.
func (s *Set) Default() string { return cmp.Or(s.all()[""].Name, Builtin) }

// CNIConf is the directory of the networks of a handler's pods, "" for the node's.
func (s *Set) CNIConf(name string) string { return s.all()[name].CNIConf }

// Find returns a handler that can run pods; errdefs.ErrNotFound if the
// configuration has none of that name, errdefs.ErrUnavailable if its runtime
// cannot be run.
func (s *Set) Find(ctx context.Context, name string) (Status, error) {
	if _, known := s.all()[name]; name != "" && name != Builtin && !known {
		return Status{}, fmt.Errorf("runtime handler %q is unknown, there are %q: %w", name, s.Names(), errdefs.ErrNotFound)
	}
	status := s.status(ctx, name, nil)
	return status, status.Err
}

// List returns all handlers, "" first. It waits until each program has answered, or was
// ended at its limit, and no longer than ctx: one that has not answered by then has an
// error that says so, and an answer the next time.
func (s *Set) List(ctx context.Context) []Status {
	s.mu.Lock()
	try := s.try
	s.mu.Unlock()
	names := append([]string{""}, s.Names()...)
	list := make([]Status, len(names))
	var wait sync.WaitGroup
	for i, name := range names {
		wait.Go(func() { list[i] = s.status(ctx, name, try) })
	}
	wait.Wait()
	return list
}

// status asks a handler's program, and tries it if try is not nil.
func (s *Set) status(ctx context.Context, name string, try func([]string) error) Status {
	spec := s.all()[name]
	status := Status{Spec: spec, Features: s.builtin}
	status.Name = name
	if len(spec.Program) == 0 {
		return status
	}
	path := spec.Program[0]
	status.Features, status.Err = s.ask(ctx, path, path, "said what it can do", func() (Features, error) { return askFeatures(path) })
	// What the runtime can do, this machine must be able to do, too.
	status.Features.RecursiveReadOnlyMounts = status.Features.RecursiveReadOnlyMounts && s.builtin.RecursiveReadOnlyMounts
	status.Features.UserNamespaces = status.Features.UserNamespaces && s.builtin.UserNamespaces
	if try != nil && status.Err == nil {
		_, status.Err = s.ask(ctx, "try "+strings.Join(spec.Program, " "), path, "made a container on trial",
			func() (Features, error) { return Features{}, try(spec.Program) })
	}
	if status.Err != nil {
		status.Err = fmt.Errorf("runtime handler %q: %w: %w", name, status.Err, errdefs.ErrUnavailable)
	}
	return status
}

// question is one run of a program. The answer counts while its file is the same, an error for
// errorLife.
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
	// errorLife is long because the kubelet asks for the status every few seconds.
	errorLife = 15 * time.Second
	// mostSaid is how much of its answer is taken, in bytes.
	mostSaid = 1 << 20
)

// ask returns the answer that counts, or asks anew. It waits no longer than ctx; the
// program continues until the limit of answer, and what it says is there for the next caller.
func (s *Set) ask(ctx context.Context, key, path, task string, answer func() (Features, error)) (Features, error) {
	file, err := os.Stat(path)
	if err != nil {
		return Features{}, fmt.Errorf("its runtime is not there: %w", err)
	}
	s.mu.Lock()
	asked := s.asked[key]
	if asked == nil || !asked.counts(file) {
		asked = &question{file: file, done: make(chan struct{})}
		s.asked[key] = asked
		go func() { // ends with answer
			defer close(asked.done)
			asked.features, asked.err = answer()
			asked.at = time.Now()
		}()
	}
	s.mu.Unlock()
	select {
	case <-asked.done:
		return asked.features, asked.err
	case <-ctx.Done():
		return Features{}, fmt.Errorf("%s has not yet %s: %w", path, task, context.Cause(ctx))
	}
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

// askFeatures runs "PROGRAM features" (runtime-spec, features.md). Runtimes that do not have it
// yet need a version, and count as those that can do nothing beyond the rest.
func askFeatures(path string) (Features, error) {
	said, err := run(path, "features")
	var parsed features.Features
	if err == nil && json.Unmarshal(said, &parsed) == nil && parsed.OCIVersionMin != "" {
		return fromSpec(&parsed), nil
	}
	_, err = run(path, "--version")
	return Features{}, err
}

// run runs a program within askLimit and returns what it says, without waiting for what it has
// left with its output. It ends with us (PR_SET_PDEATHSIG, for which the goroutine keeps its
// thread).
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
