package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/doctor"
	"github.com/minicri/minicri/internal/handler"
	"github.com/minicri/minicri/internal/manual"
	"github.com/minicri/minicri/internal/node"
)

// errNotClean is how `minicri check` ends when there is a problem.
var errNotClean = errors.New("this node has problems, see above")

// checkCommand is `minicri check`: what this node lacks, and what was left.
func checkCommand(ctx context.Context, arguments []string, output io.Writer) error {
	var fix, force, asJSON bool
	command := manual.Find("check")
	help := command.FlagHelp
	c, err := config.Load(arguments, os.Stderr, command.Describe, func(set *flag.FlagSet) {
		set.BoolVar(&fix, "fix", false, help("fix"))
		set.BoolVar(&force, "force", false, help("force"))
		set.BoolVar(&asJSON, "json", false, help("json"))
	})
	if err != nil {
		return err
	}
	if force && !fix {
		return errors.New("--force goes with --fix")
	}
	findings, err := examine(ctx, c)
	if err != nil {
		return err
	}
	if fix {
		findings = doctor.Fix(findings, force)
	}
	if err := printFindings(output, findings, asJSON); err != nil {
		return err
	}
	if !doctor.Clean(findings) {
		return errNotClean
	}
	return nil
}

// examine looks at the node, and asks its daemon what only that can know.
func examine(ctx context.Context, c *config.Config) ([]doctor.Finding, error) {
	identity, err := node.Read(c.Root)
	if err != nil {
		return nil, err
	}
	shim, err := findShim(c.Shim)
	if err != nil {
		shim = c.Shim
	}
	_, skipped := nriSource(c).Survey()
	return doctor.Run(ctx, doctor.Options{
		Config: c, Shim: shim, Node: identity, Handlers: handler.New(handlerSpecs(c), handler.Features{}),
		Snapshots: snapshotsOf(ctx, c), Plugins: skipped,
	}), nil
}

func printFindings(output io.Writer, findings []doctor.Finding, asJSON bool) error {
	if asJSON {
		encoder := json.NewEncoder(output)
		encoder.SetIndent("", "  ")
		return encoder.Encode(findings)
	}
	marks := map[doctor.Grade]string{doctor.Good: "✓", doctor.Warning: "!", doctor.Problem: "✗"}
	width := 0
	for _, f := range findings {
		width = max(width, len(f.Subject))
	}
	for _, f := range findings {
		line := fmt.Sprintf("%s %-*s  %s", marks[f.Grade], width, f.Subject, f.Message)
		if f.Advice != "" {
			line += "\n  " + fmt.Sprintf("%-*s  → %s", width, "", f.Advice)
		}
		if _, err := fmt.Fprintln(output, line); err != nil {
			return err
		}
	}
	return nil
}
