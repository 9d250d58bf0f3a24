// Package doctor checks what a node lacks to run pods, and where the kernel differs from what the runtime
// believes, with and without a running daemon. Only Fix changes anything. The package keeps no state.
package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/handler"
	"github.com/minicri/minicri/internal/node"
	"github.com/minicri/minicri/network"
)

// Grade says how bad a finding is.
type Grade string

const (
	// Good means that there is nothing to do.
	Good Grade = "ok"
	// Warning means that pods run, but not all of what they need works.
	Warning Grade = "warning"
	// Problem means that pods do not run or that something is left behind.
	Problem Grade = "problem"
)

// Finding is the result of one check.
type Finding struct {
	Subject string `json:"subject"`
	Grade   Grade  `json:"grade"`
	Message string `json:"message"`
	Advice  string `json:"advice,omitempty"`
	// fix removes what was left; force may lose something. Either may be nil. fixed says what fix did, id whose it is.
	fix, force func() error
	fixed, id  string
	// Fixed is true for a problem that Fix has solved.
	Fixed bool `json:"fixed,omitempty"`
	// IDs are the attachments that one line stands for; abandon abandons one of them.
	IDs     []string `json:"ids,omitempty"`
	abandon func(id string) error
}

// Options describe the node.
type Options struct {
	Config *config.Config
	Node   *node.Node
	// Daemon is what the running daemon says, nil if none serves. Ended asks it whether a pod has ended, Building
	// which are being made.
	Daemon   *Daemon
	Ended    func(id string) bool
	Building func() (ids []string, err error)
	// Configuration has errors that a daemon refuses to start with, Unknown the keys that it ignores.
	Configuration, Unknown []error
	// Plugins are problems of NRI plugins, Registries of files that configure registries.
	Plugins, Registries []error
	Shim                string
	Handlers            *handler.Set
}

// Run checks everything, in the order of a report.
func Run(ctx context.Context, options Options) []Finding {
	c := &checker{Options: options}
	for _, problem := range c.Configuration {
		c.problem("configuration", problem.Error(), "correct it: the daemon does not start with it; 'minicri config check' says whether it is good")
	}
	for _, key := range c.Unknown {
		c.add("configuration", Warning, key.Error(), "correct it: it is without effect")
	}
	c.kernel()
	c.fileSystem("root", c.Config.Root)
	c.fileSystem("state", c.Config.State)
	c.programs(ctx)
	c.networks()
	c.leaks()
	c.supervisors()
	return c.findings
}

// Clean reports whether no finding is a problem.
func Clean(findings []Finding) bool {
	return !slices.ContainsFunc(findings, func(f Finding) bool { return f.Grade == Problem })
}

// Fix removes what was left behind. With force it gives up what has one of the ids or, without ids, what is in
// quarantine, even if that loses something. The findings tell the result.
func Fix(findings []Finding, force bool, ids []string) []Finding {
	fixed := make([]Finding, len(findings))
	for i, f := range findings {
		fixed[i] = f.without(ids)
		force := force && f.force != nil && (slices.Contains(ids, f.id) || len(ids) == 0 && f.fix != nil)
		err, done := errors.ErrUnsupported, f.fixed
		switch {
		case f.fix != nil:
			err = f.fix()
		case !force:
			continue
		}
		if err != nil && force {
			err, done = f.force(), "given up"
		}
		if err != nil {
			fixed[i].Message += ": not fixed: " + err.Error()
			continue
		}
		fixed[i].Grade, fixed[i].Advice, fixed[i].fix, fixed[i].Fixed = Good, "", nil, true
		fixed[i].Message += ": " + done
	}
	for _, id := range ids {
		if !slices.ContainsFunc(findings, func(f Finding) bool { return f.id == id || slices.Contains(f.IDs, id) }) {
			fixed = append(fixed, Finding{Subject: "attachment", Grade: Problem, Message: fmt.Sprintf("%q cannot be given up: no attachment of this id waits for CNI DEL", id)})
		}
	}
	return fixed
}

// without abandons those of the finding's attachments that have one of the ids.
func (f Finding) without(ids []string) Finding {
	var given []string
	for _, id := range ids {
		if f.abandon == nil || !slices.Contains(f.IDs, id) {
			continue
		}
		if err := f.abandon(id); err != nil {
			f.Message += fmt.Sprintf(": %s not given up: %v", id, err)
			continue
		}
		given = append(given, id)
	}
	if len(given) > 0 {
		f.Message += fmt.Sprintf(": %d given up", len(given))
	}
	if len(given) > 0 && len(given) == len(f.IDs) {
		f.Grade, f.Advice, f.fix, f.Fixed = Good, "", nil, true
	}
	return f
}

type checker struct {
	Options
	findings []Finding
}

func (c *checker) add(subject string, grade Grade, message, advice string) *Finding {
	c.findings = append(c.findings, Finding{Subject: subject, Grade: grade, Message: message, Advice: advice})
	return &c.findings[len(c.findings)-1]
}

func (c *checker) problem(subject, message, advice string) *Finding {
	return c.add(subject, Problem, message, advice)
}

// failed adds a problem for an error, and reports whether there is one.
func (c *checker) failed(subject string, err error) bool {
	if err != nil {
		c.problem(subject, err.Error(), "")
	}
	return err != nil
}

// when adds a finding, which is good if the condition holds.
func (c *checker) when(holds bool, grade Grade, subject, good, bad, advice string) {
	if holds {
		c.add(subject, Good, good, "")
		return
	}
	c.add(subject, grade, bad, advice)
}

// Daemon is what the running daemon says of itself.
type Daemon struct {
	Conditions []Condition
	// Orphans are keys of snapshots without a container, Drifted the attachments that CNI CHECK found changed.
	Orphans []string
	Drifted []network.Drift
	// Networks are the problems of network files, and how the daemon does without them.
	Networks []string
	// Err is why there is no status.
	Err error
}

// Condition is a condition of the status; the kubelet runs pods while those that it knows hold.
type Condition struct {
	Type    string
	Holds   bool
	Message string
}
