package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"slices"

	"go.yaml.in/yaml/v3"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/doctor"
	"github.com/minicri/minicri/internal/handler"
	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/internal/node"
	"github.com/minicri/minicri/internal/redact"
)

// errNotClean is how `minicri check` ends when there is a problem.
var errNotClean = errors.New("this node has problems, see above")

// checkCommand is `minicri check`: what this node lacks, and what was left.
func checkCommand(ctx context.Context, arguments []string, output io.Writer) error {
	var fix, force, asJSON, pod bool
	l, ids, err := look(arguments, func(set *flag.FlagSet) {
		set.BoolVar(&fix, "fix", false, "")
		set.BoolVar(&force, "force", false, "")
		set.BoolVar(&asJSON, "json", false, "")
		set.BoolVar(&pod, "pod", false, "")
	})
	if err != nil {
		return err
	}
	if force && !fix {
		return misused("--force goes with --fix")
	}
	if len(ids) > 0 && !force {
		return misused("%q: an attachment is given up with --fix --force ID only", ids[0])
	}
	if fix && len(l.Broken) > 0 {
		return fmt.Errorf("--fix needs a configuration that is right, to know what is this node's: %w", errors.Join(l.Broken...))
	}
	findings, err := examine(ctx, l, ids)
	if err != nil {
		return err
	}
	if fix {
		findings = doctor.Fix(findings, force)
	}
	if pod {
		findings = append(findings, tryPod(ctx, l.Config))
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
func examine(ctx context.Context, l *config.Loaded, giveUp []string) ([]doctor.Finding, error) {
	c := l.Config
	identity, err := node.Read(c.Root)
	if err != nil {
		return nil, err
	}
	shim, err := findShim(c.Shim)
	if err != nil {
		shim = c.Shim
	}
	m, err := machine.Read(c.Root)
	if err != nil {
		return nil, err
	}
	_, plugins := nriSource(c).Survey() // those that a daemon would not start
	daemon, connected := askDaemon(ctx, c.Socket)
	if connected != nil {
		plugins = connected
	}
	problems := slices.Concat(l.Broken, located(l, preflight(c, m)))
	if daemon == nil {
		problems = append(problems, located(l, obstacles(ctx, c, nil))...)
	}
	return doctor.Run(ctx, doctor.Options{
		Ended:  func(id string) bool { return daemon != nil && hasEnded(ctx, c.Socket, id) },
		Config: c, Daemon: daemon, Configuration: problems, Unknown: l.Unknown, Shim: shim, Node: identity, Handlers: handler.New(handlerSpecs(c), handler.Features{}),
		Snapshots: snapshotsOf(ctx, c), Plugins: plugins, GiveUp: giveUp,
		Registries: image.CheckRegistries(c.Images.CertsDirs, c.Images.DockerConfig),
	}), nil
}

func printFindings(output io.Writer, findings []doctor.Finding, asJSON bool) error {
	if asJSON {
		return writeJSON(output, findings)
	}
	marks := map[doctor.Grade]string{doctor.Good: "✓", doctor.Warning: "!", doctor.Problem: "✗"}
	width := 0
	for _, f := range findings {
		width = max(width, len(f.Subject))
	}
	for _, f := range findings {
		line := fmt.Sprintf("%s %-*s  %s", marks[f.Grade], width, redact.Line(f.Subject), redact.Line(f.Message))
		if f.Advice != "" {
			line += "\n  " + fmt.Sprintf("%-*s  → %s", width, "", redact.Line(f.Advice))
		}
		if _, err := fmt.Fprintln(output, line); err != nil {
			return err
		}
	}
	return nil
}

// writeJSON writes a value for people: its texts are from outside.
func writeJSON(output io.Writer, value any) error {
	document, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		return err
	}
	_, err = output.Write(redact.PrintableJSON(append(document, '\n')))
	return err
}

// writeYAML writes a value with the keys that it has in JSON.
func writeYAML(output io.Writer, value any) error {
	document, err := json.Marshal(value)
	if err != nil {
		return err
	}
	var read any
	if err := yaml.Unmarshal(redact.PrintableJSON(document), &read); err != nil {
		return err
	}
	if document, err = yaml.Marshal(read); err != nil {
		return err
	}
	_, err = output.Write(document)
	return err
}
