// Package doctor looks at a node for people: what it lacks to run pods, and
// where the kernel holds something else than the runtime believes. It works
// with a running daemon and without one; only Fix changes anything. It keeps no state.
package doctor

import (
	"context"
	"slices"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/handler"
	"github.com/minicri/minicri/internal/node"
)

// Grade says how bad a finding is.
type Grade string

const (
	// Good: nothing to do.
	Good Grade = "ok"
	// Warning: pods run, something of them does not.
	Warning Grade = "warning"
	// Problem: pods do not run, or something is left behind.
	Problem Grade = "problem"
)

// Finding is one thing that was looked at.
type Finding struct {
	Subject string `json:"subject"`
	Grade   Grade  `json:"grade"`
	// Message says what was found, Advice what to do about it.
	Message string `json:"message"`
	Advice  string `json:"advice,omitempty"`
	// fix removes what was left, nil where a person has to. force does what may
	// lose something; nil where nothing may.
	fix, force func() error
	// fixed says what fix has done.
	fixed string
}

// Options say which node is looked at, and what its programs say of it.
type Options struct {
	Config *config.Config
	Node   *node.Node
	// Daemon is what the daemon that serves says, nil if none does; Ended asks it whether a
	// pod has ended, or is gone.
	Daemon *Daemon
	Ended  func(id string) bool
	// Configuration is what is wrong with it: a daemon refuses to start with that. Unknown
	// are its keys that this build does not have.
	Configuration, Unknown []error
	// Plugins are the problems of NRI plugins, Registries those of the files that say how
	// registries are reached.
	Plugins, Registries []error
	// Shim is the path of the minicri-shim that the daemon would use.
	Shim string
	// Handlers are the runtime handlers of the configuration.
	Handlers *handler.Set
	// GiveUp are the ids of attachments whose undoing Fix gives up.
	GiveUp []string
}

// Run looks at everything, in the order in which a report shows it.
func Run(ctx context.Context, options Options) []Finding {
	c := &checker{Options: options}
	for _, problem := range c.Configuration {
		c.problem("configuration", problem.Error(), "correct it: the daemon does not start with it; 'minicri config check' says whether it is good")
	}
	for _, key := range c.Unknown {
		c.add("configuration", Warning, key.Error(), "correct it: it is without effect")
	}
	c.kernel()
	c.storage()
	c.programs(ctx)
	c.networks()
	c.leaks()
	c.supervisors()
	return c.findings
}

// Clean reports whether there is no problem among the findings.
func Clean(findings []Finding) bool {
	return !slices.ContainsFunc(findings, func(f Finding) bool { return f.Grade == Problem })
}

// Fix removes what was left behind, and says with each finding what came of it.
// With force it also does what may lose something.
func Fix(findings []Finding, force bool) []Finding {
	fixed := make([]Finding, len(findings))
	for i, f := range findings {
		fixed[i] = f
		if f.fix == nil {
			continue
		}
		err := f.fix()
		if err != nil && force && f.force != nil {
			err = f.force()
		}
		if err != nil {
			fixed[i].Message += ": not fixed: " + err.Error()
			continue
		}
		fixed[i].Grade, fixed[i].Advice, fixed[i].fix = Good, "", nil
		fixed[i].Message += ": " + f.fixed
	}
	return fixed
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

// failed adds a problem if there is an error, and reports whether there is.
func (c *checker) failed(subject string, err error) bool {
	if err != nil {
		c.problem(subject, err.Error(), "")
	}
	return err != nil
}

// when adds a finding that is good if the condition holds.
func (c *checker) when(holds bool, grade Grade, subject, good, bad, advice string) {
	if holds {
		c.add(subject, Good, good, "")
		return
	}
	c.add(subject, grade, bad, advice)
}

// Daemon is what the daemon that serves says of itself.
type Daemon struct {
	// Conditions are those of its status.
	Conditions []Condition
	// Orphans are the keys of snapshots that no container explains.
	Orphans []string
	// Err says why there is none.
	Err error
}

// Condition is one of the status: the kubelet runs pods while all that it knows hold.
type Condition struct {
	Type    string
	Holds   bool
	Message string
}
