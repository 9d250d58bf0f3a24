package step

import (
	"slices"
	"strings"
)

// Name is the name of a step: its kind, a slash, and the step's own name.
type Name string

// Kind is what the step happens to: "pod" or "container".
func (n Name) Kind() string {
	kind, _, _ := strings.Cut(string(n), "/")
	return kind
}

// Own is the name without its kind.
func (n Name) Own() string {
	_, own, _ := strings.Cut(string(n), "/")
	return own
}

// Before and After are the failpoints around the step.
func (n Name) Before() string { return string(n) + " before" }

// After is passed when the step has succeeded.
func (n Name) After() string { return string(n) + " after" }

// Error is the failure of a step.
type Error struct {
	Step Name
	Err  error
}

// Error says the step and why it failed.
func (e *Error) Error() string { return e.Step.Own() + ": " + e.Err.Error() }

// Unwrap returns why the step failed.
func (e *Error) Unwrap() error { return e.Err }

// Step is one step of a life, as the lists of sandbox and container have it.
type Step struct {
	Name Name
	// Operation is what goes through the step: "run", "stop", "remove" ...
	Operation string
	// Only says for which objects the step is done; "" for all.
	Only string
}

// Names are the names of the steps of an operation, in their order, for objects
// that are what Only asks for.
func Names(steps []Step, operation string, are ...string) []Name {
	var names []Name
	for _, s := range steps {
		if s.Operation == operation && (s.Only == "" || slices.Contains(are, s.Only)) {
			names = append(names, s.Name)
		}
	}
	return names
}
