// Package handler knows the runtime handlers of this node: what runs the
// containers of each, whether it is there, and what it can do.
//
// A handler of type builtin is libcontainer in minicri-shim; one of type oci is
// a program with runc's command line, asked for its features by its own verb
// "features"; one of type shim is a shim of containerd's, asked for its version. What a program has said is kept until its file changes; one that
// could not be asked is asked again each time. A Set has a lock, which is not
// held while a program is asked.
package handler

import (
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"slices"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go/features"
)

// Spec is what the configuration says of a handler.
type Spec struct {
	// Program is the path and the global flags of a runtime; none for
	// libcontainer.
	Program []string
	// Shim: it is a shim of containerd's, not a program with runc's command line.
	Shim bool
	// CNIConf is the directory of the network configurations of its pods, "" for
	// the node's.
	CNIConf string
}

// Features are what a handler's runtime can do.
type Features struct {
	RecursiveReadOnlyMounts bool
	UserNamespaces          bool
}

// Status is a handler as it is now.
type Status struct {
	Name    string   `json:"name"`
	Program []string `json:"program,omitempty"`
	// Shim says what Program is, as in Spec.
	Shim     bool     `json:"shim,omitempty"`
	CNIConf  string   `json:"cni_conf_dir,omitempty"`
	Features Features `json:"features"`
	// Err says why the handler cannot run pods.
	Err error `json:"-"`
}

// Set are the handlers of this node.
type Set struct {
	builtin Features
	// specs are replaced, never changed.
	specs atomic.Pointer[map[string]Spec]

	mu    sync.Mutex
	asked map[string]answer
}

// answer is what a program said, as long as its file is the same.
type answer struct {
	file     fs.FileInfo
	features Features
}

// New returns the handlers of a configuration, and "", which is builtin. The
// features of libcontainer are those of the machine.
func New(specs map[string]Spec, builtin Features) *Set {
	s := &Set{builtin: builtin, asked: make(map[string]answer)}
	s.Replace(specs)
	return s
}

// Replace puts other handlers in the place of all but "". Pods that run keep the
// name of theirs.
func (s *Set) Replace(specs map[string]Spec) { s.specs.Store(&specs) }

// Names are the handlers besides "", sorted; a nil Set has none.
func (s *Set) Names() []string {
	if s == nil {
		return nil
	}
	names := make([]string, 0, len(*s.specs.Load()))
	for name := range *s.specs.Load() {
		names = append(names, name)
	}
	sort.Strings(names)
	return names
}

// CNIConf is the directory of the network configurations of a handler's pods, ""
// for the node's.
func (s *Set) CNIConf(name string) string {
	if s == nil {
		return ""
	}
	return (*s.specs.Load())[name].CNIConf
}

// Find returns a handler that can run pods; errdefs.ErrNotFound if the
// configuration has none of that name, errdefs.ErrUnavailable if its runtime
// cannot be run.
func (s *Set) Find(ctx context.Context, name string) (Status, error) {
	if _, known := (*s.specs.Load())[name]; name != "" && !known {
		return Status{}, fmt.Errorf("runtime handler %q is unknown, there are %q: %w", name, s.Names(), errdefs.ErrNotFound)
	}
	status := s.status(ctx, name)
	return status, status.Err
}

// List returns all handlers, "" first.
func (s *Set) List(ctx context.Context) []Status {
	list := []Status{s.status(ctx, "")}
	for _, name := range s.Names() {
		list = append(list, s.status(ctx, name))
	}
	return list
}

func (s *Set) status(ctx context.Context, name string) Status {
	spec := (*s.specs.Load())[name]
	status := Status{Name: name, Program: spec.Program, Shim: spec.Shim, CNIConf: spec.CNIConf, Features: s.builtin}
	if len(status.Program) > 0 {
		status.Features, status.Err = s.ask(ctx, status)
		// What the runtime can do, this machine must be able to do, too.
		status.Features.RecursiveReadOnlyMounts = status.Features.RecursiveReadOnlyMounts && s.builtin.RecursiveReadOnlyMounts
		status.Features.UserNamespaces = status.Features.UserNamespaces && s.builtin.UserNamespaces
	}
	if status.Err != nil {
		status.Err = fmt.Errorf("runtime handler %q: %w: %w", name, status.Err, errdefs.ErrUnavailable)
	}
	return status
}

// ask returns the features of a handler's program.
func (s *Set) ask(ctx context.Context, of Status) (Features, error) {
	path, ask := of.Program[0], askFeatures
	if of.Shim {
		ask = askShim
	}
	file, err := os.Stat(path)
	if err != nil {
		return Features{}, fmt.Errorf("its runtime is not there: %w", err)
	}
	s.mu.Lock()
	known, found := s.asked[path]
	s.mu.Unlock()
	if found && os.SameFile(known.file, file) && known.file.ModTime().Equal(file.ModTime()) && known.file.Size() == file.Size() {
		return known.features, nil
	}
	fresh, err := ask(ctx, path)
	if err != nil {
		return Features{}, err
	}
	s.mu.Lock()
	s.asked[path] = answer{file, fresh}
	s.mu.Unlock()
	return fresh, nil
}

// askLimit bounds a run of a runtime that only has to say what it is.
const askLimit = 5 * time.Second

// askFeatures runs "PROGRAM features" (runtime-spec, features.md). Runtimes
// that do not have it yet can still run: they have to have a version then, and
// count as those that can do nothing beyond the rest.
func askFeatures(ctx context.Context, path string) (Features, error) {
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	said, err := exec.CommandContext(ctx, path, "features").Output()
	var parsed features.Features
	if err == nil && json.Unmarshal(said, &parsed) == nil && parsed.OCIVersionMin != "" {
		return fromSpec(&parsed), nil
	}
	if out, err := exec.CommandContext(ctx, path, "--version").CombinedOutput(); err != nil {
		return Features{}, fmt.Errorf("%s --version: %w: %.200s", path, err, out)
	}
	return Features{}, nil
}

// askShim: a shim has to say its version. What its runtime can do, version 2 of
// the protocol has no words for, so it counts as nothing beyond the rest.
func askShim(ctx context.Context, path string) (Features, error) {
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	if out, err := exec.CommandContext(ctx, path, "-v").CombinedOutput(); err != nil {
		return Features{}, fmt.Errorf("%s -v: %w: %.200s", path, err, out)
	}
	return Features{}, nil
}

func fromSpec(f *features.Features) Features {
	can := Features{RecursiveReadOnlyMounts: slices.Contains(f.MountOptions, "rro")}
	if f.Linux != nil && f.Linux.MountExtensions != nil && f.Linux.MountExtensions.IDMap != nil {
		idmap := f.Linux.MountExtensions.IDMap.Enabled
		can.UserNamespaces = idmap != nil && *idmap && slices.Contains(f.Linux.Namespaces, "user")
	}
	return can
}
