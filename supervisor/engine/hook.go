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

// HookCommand is the command of minicri-shim that calls RunHook.
const HookCommand = "hook"

// hookMargin is what ending a hook and all that it started may take longer.
const hookMargin = 5 * time.Second

// hookPath is what a hook's programs are looked for in, if the hook says
// nothing about its environment.
const hookPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// takeHooks makes each hook of the configuration one that RunHook runs, limited
// and named, and takes those out which libcontainer runs at another time than
// the specification wants: poststart when init waits at the barrier, and
// poststop when errors of it make Destroy fail.
func takeHooks(config *configs.Config) {
	delete(config.Hooks, configs.Poststart)
	delete(config.Hooks, configs.Poststop)
	for name, list := range config.Hooks {
		for i, hook := range list {
			command, ok := hook.(configs.CommandHook)
			if !ok {
				continue
			}
			if name == configs.StartContainer {
				// It runs in the container, which has not what this program needs.
				if command.Timeout == nil {
					command.Timeout = new(runtime.DefaultHookLimit)
				}
				continue
			}
			list[i] = configs.NewCommandHook(limited(command.Command))
		}
	}
}

// limited runs a hook by this program.
func limited(hook *configs.Command) *configs.Command {
	limit := runtime.DefaultHookLimit
	if hook.Timeout != nil {
		limit = *hook.Timeout
	}
	args := hook.Args
	if len(args) == 0 {
		args = []string{hook.Path}
	}
	env := hook.Env
	if len(env) == 0 {
		env = []string{hookPath}
	}
	return &configs.Command{
		Path:    "/proc/self/exe",
		Args:    append([]string{"minicri-shim", HookCommand, limit.String(), hook.Path}, args...),
		Env:     env,
		Timeout: new(limit + hookMargin),
	}
}

func hookCommand(hook specs.Hook) *configs.Command {
	command := &configs.Command{Path: hook.Path, Args: hook.Args, Env: hook.Env}
	if hook.Timeout != nil {
		command.Timeout = new(time.Duration(*hook.Timeout) * time.Second)
	}
	return command
}

// runHooks runs the hooks of one kind that were taken from libcontainer, all of them
// whatever becomes of the others.
func (c *libContainer) runHooks(name configs.HookName) error { return c.hooks(name)() }

// hooks returns what runs the hooks of one kind, which are in the bundle: the container
// may be gone by then.
func (c *libContainer) hooks(name configs.HookName) (run func() error) {
	spec, err := runtime.ReadSpec(c.Bundle)
	if err != nil {
		return func() error { return nil } // never made
	}
	if spec.Hooks == nil {
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
			if err := configs.NewCommandHook(limited(hookCommand(hook))).Run(state); err != nil {
				errs = append(errs, fmt.Errorf("%s hook: %w", name, err))
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
