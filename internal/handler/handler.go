// Package handler knows the runtime handlers of this node: what runs the
// containers of each, whether it is there, and what it can do.
//
// A handler of type builtin is libcontainer in minicri-shim; one of type oci is
// a program with runc's command line, asked for its features by its own verb
// "features", and to make a container on trial before it is listed as one that can run
// pods. What a program has said is kept until its file changes; one that could not be
// asked is asked again after a while. A Set has locks, which are not held while a
// program is asked; all programs are asked concurrently, and List does not wait
// for one that hangs.
package handler

import (
	"cmp"
	"context"
	"fmt"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
)

// Spec is what the configuration says of a handler.
type Spec struct {
	// Name is that of the handler which "" stands for, in the Spec of "" alone.
	Name string
	// Program is the path and the global flags of a runtime; none for
	// libcontainer.
	Program []string
	// CNIConf is the directory of the network configurations of its pods, "" for
	// the node's.
	CNIConf string
	// OwnSandbox: each container has a sandbox of the runtime's own, which shares no
	// processes and no IPC with others.
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
	Name     string   `json:"name"`
	Program  []string `json:"program,omitempty"`
	CNIConf  string   `json:"cni_conf_dir,omitempty"`
	Features Features `json:"features"`
	// OwnSandbox is as in Spec.
	OwnSandbox bool `json:"sandbox_per_container,omitempty"`
	// Err says why the handler cannot run pods.
	Err error `json:"-"`
}

// Set are the handlers of this node.
type Set struct {
	builtin Features
	// specs are replaced, never changed.
	specs atomic.Pointer[map[string]Spec]
	try   atomic.Pointer[func([]string) error]

	questions
}

// New returns the handlers of a configuration, and "", which is builtin. The
// features of libcontainer are those of the machine.
func New(specs map[string]Spec, builtin Features) *Set {
	s := &Set{builtin: builtin, questions: newQuestions()}
	s.Replace(specs)
	return s
}

// Replace puts other handlers in the place of all but "". Pods that run keep the
// name of theirs.
func (s *Set) Replace(specs map[string]Spec) { s.specs.Store(&specs) }

// ProveBy has List say of a program that it cannot run pods unless try succeeds with it:
// its path and its flags. try is called once at a time for each program, again when its
// file has changed and some time after a failure, and returns within a limit of its own.
// Find does not wait for it: what is tried there is the pod itself.
func (s *Set) ProveBy(try func(program []string) error) { s.try.Store(&try) }

// Names are the handlers besides "", sorted; a nil Set has none.
func (s *Set) Names() []string {
	if s == nil {
		return nil
	}
	names := make([]string, 0, len(*s.specs.Load()))
	for name := range *s.specs.Load() {
		if name != "" { // what stands for it
			names = append(names, name)
		}
	}
	sort.Strings(names)
	return names
}

// Builtin is the name of libcontainer where no other handler stands for "". No handler
// of a configuration can have it.
const Builtin = "(builtin)"

// Default is the name of the handler that "" stands for now: who keeps it has the same
// handler after Replace. It is "" for a nil Set.
func (s *Set) Default() string {
	if s == nil {
		return ""
	}
	return cmp.Or((*s.specs.Load())[""].Name, Builtin)
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
	if _, known := (*s.specs.Load())[name]; name != "" && name != Builtin && !known {
		return Status{}, fmt.Errorf("runtime handler %q is unknown, there are %q: %w", name, s.Names(), errdefs.ErrNotFound)
	}
	status := s.status(ctx, name)
	return status, status.Err
}

// listTimeout is how long List waits for programs: the kubelet asks for the
// status of the node again and again.
const listTimeout = 2 * time.Second

// List returns all handlers, "" first. One whose program has not answered in time
// has an error that says so, and an answer the next time.
func (s *Set) List(ctx context.Context) []Status {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	return s.ListAll(ctx)
}

// ListAll is List, but waits until each program has answered, or was ended at its
// limit: for a caller that asks once, and who would take a slow program for a bad one.
func (s *Set) ListAll(ctx context.Context) []Status {
	names := append([]string{""}, s.Names()...)
	list := make([]Status, len(names))
	var wait sync.WaitGroup
	for i, name := range names {
		wait.Go(func() { list[i] = s.proven(ctx, name) })
	}
	wait.Wait()
	return list
}

func (s *Set) proven(ctx context.Context, name string) Status {
	status := s.status(ctx, name)
	if try := s.try.Load(); try != nil && status.Err == nil && len(status.Program) > 0 {
		if err := s.prove(ctx, Spec{Program: status.Program}, *try); err != nil {
			status.Err = unavailable(name, err)
		}
	}
	return status
}

func unavailable(name string, err error) error {
	return fmt.Errorf("runtime handler %q: %w: %w", name, err, errdefs.ErrUnavailable)
}

func (s *Set) status(ctx context.Context, name string) Status {
	spec := (*s.specs.Load())[name]
	status := Status{Name: name, Program: spec.Program, CNIConf: spec.CNIConf, OwnSandbox: spec.OwnSandbox, Features: s.builtin}
	if len(status.Program) > 0 {
		status.Features, status.Err = s.ask(ctx, spec)
		// What the runtime can do, this machine must be able to do, too.
		status.Features.RecursiveReadOnlyMounts = status.Features.RecursiveReadOnlyMounts && s.builtin.RecursiveReadOnlyMounts
		status.Features.UserNamespaces = status.Features.UserNamespaces && s.builtin.UserNamespaces
	}
	if status.Err != nil {
		status.Err = unavailable(name, status.Err)
	}
	return status
}
