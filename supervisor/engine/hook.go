package engine

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/minicri/minicri/supervisor/runtime"
)

// hookLimit is how long a hook may take that has no limit of its own. What it leaves,
// and holds its output, ends with the starter.
const hookLimit = 30 * time.Second

// takeHooks limits the hooks of the configuration, and takes those out which
// libcontainer runs at another time than the specification wants: poststart when init
// waits at the barrier, and poststop when errors of it make Destroy fail.
func takeHooks(config *configs.Config) {
	delete(config.Hooks, configs.Poststart)
	delete(config.Hooks, configs.Poststop)
	for _, list := range config.Hooks {
		for _, hook := range list {
			if command, ok := hook.(configs.CommandHook); ok && command.Timeout == nil {
				command.Timeout = new(hookLimit)
			}
		}
	}
}

// hooks returns what runs the hooks of one kind that were taken from libcontainer, all of
// them whatever becomes of the others. They are in the bundle: the container may be gone
// by then.
func (c *libContainer) hooks(name configs.HookName) (run func() error) {
	spec, err := runtime.ReadSpec(c.Bundle)
	if err != nil || spec.Hooks == nil { // never made, or without any
		return func() error { return nil }
	}
	list, status := spec.Hooks.Poststart, specs.StateRunning
	if name == configs.Poststop {
		list, status = spec.Hooks.Poststop, specs.StateStopped
	}
	state := &specs.State{Version: specs.Version, ID: c.ID, Status: status, Bundle: c.Bundle, Annotations: spec.Annotations}
	if status == specs.StateRunning {
		state.Pid = c.InitPID
	}
	return func() error {
		var errs []error
		for _, hook := range list {
			command := &configs.Command{Path: hook.Path, Args: hook.Args, Env: hook.Env, Timeout: new(hookLimit)}
			if hook.Timeout != nil {
				command.Timeout = new(time.Duration(*hook.Timeout) * time.Second)
			}
			if err := command.Run(state); err != nil {
				errs = append(errs, fmt.Errorf("%s hook %s: %w", name, hook.Path, err))
			}
		}
		return errors.Join(errs...)
	}
}

// bundleLabel is where libcontainer keeps the bundle that hooks get in their state.
const bundleLabel = "bundle"

// nameBundle makes the bundle of the state that hooks get the container's own:
// libcontainer takes its working directory for it.
func nameBundle(config *configs.Config, bundle string) {
	config.Labels = slices.DeleteFunc(config.Labels, func(label string) bool { return strings.HasPrefix(label, bundleLabel+"=") })
	config.Labels = append(config.Labels, bundleLabel+"="+bundle)
}
