package oci

import (
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// ForExec makes the process of a command that is run in a container: all is as
// with the container's own, but for what is run and its terminal.
func ForExec(spec *specs.Spec, command []string, terminal bool) *specs.Process {
	process := *spec.Process
	process.Args = slices.Clone(command)
	process.Terminal = terminal
	process.Env = slices.Clone(process.Env)
	hasTerm := slices.ContainsFunc(process.Env, func(pair string) bool { return strings.HasPrefix(pair, "TERM=") })
	if terminal && !hasTerm {
		process.Env = append(process.Env, "TERM=xterm")
	}
	return &process
}
