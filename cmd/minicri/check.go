package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/doctor"
	"github.com/minicri/minicri/internal/handler"
	"github.com/minicri/minicri/internal/manual"
	"github.com/minicri/minicri/internal/node"
	"github.com/minicri/minicri/internal/redact"
)

// errNotClean is how `minicri check` ends when there is a problem.
var errNotClean = errors.New("this node has problems, see above")

// checkCommand is `minicri check`: what this node lacks, and what was left.
func checkCommand(ctx context.Context, arguments []string, output io.Writer) error {
	var fix, force, asJSON bool
	command := manual.Find("check")
	help := command.FlagHelp
	c, ids, err := config.LoadWith(arguments, os.Stderr, command.Describe, func(set *flag.FlagSet) {
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
	if len(ids) > 0 && !force {
		return fmt.Errorf("%q: an attachment is given up with --fix --force ID only", ids[0])
	}
	findings, err := examine(ctx, c, ids)
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
func examine(ctx context.Context, c *config.Config, giveUp []string) ([]doctor.Finding, error) {
	identity, err := node.Read(c.Root)
	if err != nil {
		return nil, err
	}
	shim, err := findShim(c.Shim)
	if err != nil {
		shim = c.Shim
	}
	plugins, err := pluginProblems(ctx, c)
	if err != nil {
		return nil, err
	}
	return doctor.Run(ctx, doctor.Options{
		Config: c, Shim: shim, Node: identity, Handlers: handler.New(handlerSpecs(c), handler.Features{}),
		Snapshots: snapshotsOf(ctx, c), Plugins: plugins, GiveUp: giveUp,
		Registries: image.CheckRegistries(c.Images.CertsDirs, c.Images.DockerConfig),
	}), nil
}

// pluginProblems are what is wrong with NRI plugins: the daemon knows which are
// connected; without one it is known which it would not start.
func pluginProblems(ctx context.Context, c *config.Config) (problems []error, err error) {
	_, skipped := nriSource(c).Survey()
	if !c.NRI.Enabled || !daemonServes(ctx, c.Socket) {
		return skipped, nil
	}
	connection, err := grpc.NewClient("unix://"+c.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	defer connection.Close()
	answer, err := runtimeapi.NewRuntimeServiceClient(connection).Status(ctx, &runtimeapi.StatusRequest{Verbose: true})
	if err != nil {
		return append(skipped, fmt.Errorf("ask the daemon which NRI plugins are connected: %w", err)), nil
	}
	said := answer.GetInfo()["nriProblems"]
	if said == "" {
		return skipped, nil // it is off there
	}
	var texts struct{ Items []string }
	if err := json.Unmarshal([]byte(said), &texts); err != nil {
		return nil, fmt.Errorf("read nriProblems of the daemon's status: %w", err)
	}
	for _, text := range texts.Items {
		problems = append(problems, errors.New(text))
	}
	return problems, nil
}

func printFindings(output io.Writer, findings []doctor.Finding, asJSON bool) error {
	if asJSON {
		encoder := json.NewEncoder(printableJSON{output})
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
		if _, err := fmt.Fprintln(output, redact.Printable(line)); err != nil {
			return err
		}
	}
	return nil
}

// printableJSON is where JSON is written for people: its texts are from outside.
type printableJSON struct{ output io.Writer }

func (p printableJSON) Write(document []byte) (int, error) {
	if _, err := p.output.Write(redact.PrintableJSON(document)); err != nil {
		return 0, err
	}
	return len(document), nil
}
