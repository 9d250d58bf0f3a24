package launch

import (
	"fmt"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// environmentOf has each variable once, as it was given last (prepareEnv of
// libcontainer).
func environmentOf(p *specs.Process) ([]string, error) {
	var environment []string
	seen := make(map[string]bool)
	for _, variable := range slices.Backward(p.Env) {
		name, value, found := strings.Cut(variable, "=")
		if !found || name == "" || strings.IndexByte(variable, 0) >= 0 {
			return nil, fmt.Errorf("variable %q of the environment has no name, no value, or a NUL in it: %w", name, errdefs.ErrInvalidArgument)
		}
		if !seen[name] && (name != "HOME" || value != "") {
			environment = append(environment, variable)
		}
		seen[name] = true
	}
	slices.Reverse(environment)
	return environment, nil
}

// valueOf is the value of a variable, the last one of its name.
func valueOf(env []string, name string) string {
	for _, variable := range slices.Backward(env) {
		if value, ok := strings.CutPrefix(variable, name+"="); ok {
			return value
		}
	}
	return ""
}
