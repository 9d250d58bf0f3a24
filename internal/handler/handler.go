// Package handler knows the runtime handlers of this node: what runs their containers, whether it is there,
// and what it can do. Builtin is libcontainer in minicri-shim. The type oci is a program with runc's command
// line; its verb "features" is asked, and it makes a container on trial before List calls it ready. An
// answer counts until the program's file changes, a failure for a while. A Set holds its lock only for its
// own state, never while a program runs, and asks all programs at once.
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

	"github.com/minicri/minicri/internal/process"
)

// Spec is what the configuration says of a handler.
type Spec struct {
	Name       string   // the handler that "" stands for; only the Spec of "" has it
	Runtime    []string // the path and the global flags of a runtime; none for libcontainer
	CNIConf    string   // the directory of its networks, "" for the node's
	OwnSandbox bool     // the runtime makes a sandbox for each container
}

// Features are what a handler's runtime can do.
type Features struct {
	RecursiveReadOnlyMounts bool `json:"recursive_read_only_mounts"`
	UserNamespaces          bool `json:"user_namespaces"`
	NetDevices              bool `json:"net_devices"`
	MemoryPolicy            bool `json:"memory_policy"`
}

// Status is the present state of a handler.
type Status struct {
	Spec // with the handler's name
	Features
	Err error // why the handler cannot run pods
}

// Set are the handlers of this node.
type Set struct {
	builtin Features

	mu    sync.Mutex                   // guards what follows
	specs map[string]Spec              // replaced, never changed
	try   func(program []string) error // nil before ProveBy
	asked map[string]*question         // by what a program is asked, and the program
}

// New returns the handlers of a configuration, and "", which is builtin with the machine's features.
func New(specs map[string]Spec, builtin Features) *Set {
	return &Set{builtin: builtin, specs: specs, asked: make(map[string]*question)}
}

// Replace replaces all handlers but "". Running pods keep the name of theirs.
func (s *Set) Replace(specs map[string]Spec) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.specs = specs
}

// ProveBy makes List, not Find, try each program with its flags. try limits itself. It runs once at a time
// for a program, again after its file has changed, and some time after a failure.
func (s *Set) ProveBy(try func(program []string) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.try = try
}

// all returns the specs by name.
func (s *Set) all() map[string]Spec {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.specs
}

// Names returns the handlers besides "", sorted.
func (s *Set) Names() []string {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(s.all())), func(name string) bool { return name == "" })
}

// Builtin names libcontainer where "" stands for no other handler. No configuration can have the name.
const Builtin = "(builtin)"

// Default names the handler of "" now. Whoever keeps the name has the same handler after Replace.
func (s *Set) Default() string { return cmp.Or(s.all()[""].Name, Builtin) }

// CNIConf is the directory of a handler's networks, "" for the node's.
func (s *Set) CNIConf(name string) string { return s.all()[name].CNIConf }

// Find returns a handler that can run pods, or errdefs.ErrNotFound or errdefs.ErrUnavailable.
func (s *Set) Find(ctx context.Context, name string) (Status, error) {
	if _, known := s.all()[name]; name != "" && name != Builtin && !known {
		return Status{}, fmt.Errorf("runtime handler %q is unknown, there are %q: %w", name, s.Names(), errdefs.ErrNotFound)
	}
	status := s.status(ctx, name, nil)
	return status, status.Err
}

// List returns all handlers, "" first. It waits for the programs' answers or limits, but not beyond ctx: a
// handler without an answer has an error that says so, until the next call.
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

// status asks a handler's program, and tries it unless try is nil.
func (s *Set) status(ctx context.Context, name string, try func([]string) error) Status {
	spec := s.all()[name]
	status := Status{Spec: spec, Features: s.builtin}
	status.Name = name
	if len(spec.Runtime) == 0 {
		return status
	}
	path := spec.Runtime[0]
	status.Features, status.Err = s.ask(ctx, path, path, "said what it can do", func() (Features, error) { return askFeatures(path) })
	// The machine must be able to do what the runtime can.
	status.Features.RecursiveReadOnlyMounts = status.Features.RecursiveReadOnlyMounts && s.builtin.RecursiveReadOnlyMounts
	status.Features.UserNamespaces = status.Features.UserNamespaces && s.builtin.UserNamespaces
	if try != nil && status.Err == nil {
		_, status.Err = s.ask(ctx, "try "+strings.Join(spec.Runtime, " "), path, "made a container on trial",
			func() (Features, error) { return Features{}, try(spec.Runtime) })
	}
	if status.Err != nil {
		status.Err = fmt.Errorf("runtime handler %q: %w: %w", name, status.Err, errdefs.ErrUnavailable)
	}
	return status
}

// question is a run of a program. The answer counts while its file is the same, an error for errorLife.
type question struct {
	file     fs.FileInfo
	done     chan struct{} // closed when what follows is set
	features Features
	err      error
	at       time.Time
}

const (
	// ListLimit is how long who lists all handlers waits: a program that hangs delays neither the start nor the kubelet.
	ListLimit = 2 * time.Second
	askLimit  = 5 * time.Second  // for a run that only prints something
	errorLife = 15 * time.Second // long because the kubelet asks for the status every few seconds
)

// ask returns the answer that counts, or asks anew. After ctx the program continues to its limit, and the
// next caller gets the answer.
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

// askFeatures runs "PROGRAM features" (runtime-spec, features.md). Older programs need only a version.
func askFeatures(path string) (Features, error) {
	said, err := run(path, "features")
	var parsed features.Features
	if err == nil && json.Unmarshal(said, &parsed) == nil && parsed.OCIVersionMin != "" {
		return fromSpec(&parsed), nil
	}
	_, err = run(path, "--version")
	return Features{}, err
}

// run returns the output of a program, without waiting for processes that keep its pipes. PR_SET_PDEATHSIG
// ends it with us, as long as the goroutine keeps its thread.
func run(path, argument string) ([]byte, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ctx, cancel := context.WithTimeout(context.Background(), askLimit)
	defer cancel()
	said, complained := process.Said{Max: 1 << 20}, process.Said{}
	command := exec.CommandContext(ctx, path, argument)
	command.Stdout, command.Stderr = &said, &complained
	command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL, Setpgid: true}
	// With its children: it is asked again and again.
	command.Cancel = func() error { return unix.Kill(-command.Process.Pid, unix.SIGKILL) }
	command.WaitDelay = askLimit // that long its output is read to the end
	err := command.Run()
	switch {
	case errors.Is(err, exec.ErrWaitDelay): // it has ended well, and left its output to another
		return said.Bytes(), nil
	case ctx.Err() != nil:
		return nil, fmt.Errorf("%s %s: no answer within %v", path, argument, askLimit)
	case err != nil && complained.String()+said.String() == "":
		return nil, fmt.Errorf("%s %s: %w", path, argument, err)
	case err != nil:
		return nil, fmt.Errorf("%s %s: %w: %.200q", path, argument, err, complained.String()+said.String())
	}
	return said.Bytes(), nil
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
