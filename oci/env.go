package oci

import (
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// defaultPath is the search path of images that set none.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Arguments are the command line and the environment of a container's process,
// without what devices add.
func Arguments(c *Container) (args, env []string, err error) {
	if args, err = arguments(c); err != nil {
		return nil, nil, err
	}
	spec, err := c.newSpec()
	if err != nil {
		return nil, nil, err
	}
	err = containerEnv(c, spec)
	return args, spec.Process.Env, err
}

// VariableName is the name of NAME=VALUE.
func VariableName(pair string) string {
	name, _, _ := strings.Cut(pair, "=")
	return name
}

// containerEnv: what the runtime knows, then the node's defaults, the image and
// the container; the later wins, at the place of the first.
func containerEnv(c *Container, spec *specs.Spec) error {
	env := &environment{at: make(map[string]int)}
	env.set("PATH", defaultPath)
	env.set("HOSTNAME", c.Hostname)
	if c.Config.GetTty() {
		env.set("TERM", "xterm")
	}
	for _, pair := range slices.Concat(spec.Process.Env, c.Defaults.Env, c.Image.Env) {
		name, value, _ := strings.Cut(pair, "=")
		env.set(name, value)
	}
	for _, pair := range c.Config.GetEnvs() {
		env.set(pair.GetKey(), string(pair.GetValue()))
	}
	spec.Process.Env = env.pairs
	return nil
}

type environment struct {
	pairs []string
	at    map[string]int
}

func (e *environment) set(name, value string) {
	if name == "" {
		return // an image may have it, no process can use it
	}
	if i, present := e.at[name]; present {
		e.pairs[i] = name + "=" + value
		return
	}
	e.at[name] = len(e.pairs)
	e.pairs = append(e.pairs, name+"="+value)
}
