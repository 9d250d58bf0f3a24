package runtime

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runc/libcontainer/utils"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// HookCommand is the command of minicri-shim that calls RunHook.
const HookCommand = "hook"

// defaultHookLimit is how long a hook may take that has no limit of its own.
// While one runs, nothing else can be done with its container.
const defaultHookLimit = 30 * time.Second

// hookMargin is what ending a hook and all that it started may take longer.
const hookMargin = 5 * time.Second

// hookPath is what a hook's programs are looked for in, if the hook says
// nothing about its environment.
const hookPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// takeHooks makes each hook of the configuration one that RunHook runs, limited
// and named, and takes those out which libcontainer runs at another time than
// the specification wants: poststart when init waits at the barrier, and
// poststop when errors of it make Destroy fail.
func takeHooks(config *configs.Config, id string) (taken configs.Hooks) {
	taken = configs.Hooks{}
	for name, list := range config.Hooks {
		for i, hook := range list {
			command, ok := hook.(configs.CommandHook)
			if !ok {
				continue
			}
			if name == configs.StartContainer {
				// It runs in the container, which has not what this program needs.
				if command.Timeout == nil {
					command.Timeout = new(defaultHookLimit)
				}
				continue
			}
			list[i] = configs.NewCommandHook(limited(command.Command, id))
		}
		if name == configs.Poststart || name == configs.Poststop {
			taken[name] = list
			delete(config.Hooks, name)
		}
	}
	return taken
}

// limited runs a hook by this program.
func limited(hook *configs.Command, id string) *configs.Command {
	limit := defaultHookLimit
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
		Args:    append([]string{"minicri-shim", HookCommand, id, limit.String(), hook.Path}, args...),
		Env:     env,
		Timeout: new(limit + hookMargin),
	}
}

// limitedHooks are the hooks as a runtime with runc's command line gets them: run
// by this program, but for those that run in the container, and poststop, which
// the next supervisor may run. A hook with children that hold its output would
// outlast the limit of runc.
func limitedHooks(hooks *specs.Hooks, id string) *specs.Hooks {
	if hooks == nil {
		return nil
	}
	// The program is in memory and has no path; these hooks run while it does.
	program := fmt.Sprintf("/proc/%d/exe", os.Getpid())
	limit := func(list []specs.Hook) (through []specs.Hook) {
		for _, hook := range list {
			command := limited(hookCommand(hook), id)
			through = append(through, specs.Hook{Path: program, Args: command.Args, Env: command.Env, Timeout: new(int(command.Timeout.Seconds()))})
		}
		return through
	}
	changed := *hooks
	changed.Prestart = limit(hooks.Prestart) //nolint:staticcheck // deprecated in the runtime-spec, and still served
	changed.CreateRuntime = limit(hooks.CreateRuntime)
	changed.CreateContainer = limit(hooks.CreateContainer)
	changed.Poststart = limit(hooks.Poststart)
	return &changed
}

func hookCommand(hook specs.Hook) *configs.Command {
	command := &configs.Command{Path: hook.Path, Args: hook.Args, Env: hook.Env}
	if hook.Timeout != nil {
		command.Timeout = new(time.Duration(*hook.Timeout) * time.Second)
	}
	return command
}

// StartHooks is of StartHooked.
func (c *builtinContainer) StartHooks() (names string, limit time.Duration) {
	var commands []*configs.Command
	for _, hook := range c.lib.Config().Hooks[configs.StartContainer] {
		if command, ok := hook.(configs.CommandHook); ok {
			commands = append(commands, command.Command)
		}
	}
	return together(commands)
}

// startHooks are the hooks of a bundle that run in the container, for StartHooked.
func startHooks(bundle string) (names string, limit time.Duration) {
	spec, err := ReadSpec(bundle)
	if err != nil || spec.Hooks == nil {
		return "", 0 // it cannot be started without its bundle either
	}
	var commands []*configs.Command
	for _, hook := range spec.Hooks.StartContainer {
		commands = append(commands, hookCommand(hook))
	}
	return together(commands)
}

func together(hooks []*configs.Command) (names string, limit time.Duration) {
	var paths []string
	for _, hook := range hooks {
		paths = append(paths, hook.Path)
		if hook.Timeout == nil {
			limit += defaultHookLimit
		} else {
			limit += *hook.Timeout
		}
	}
	return strings.Join(paths, ", "), limit
}

// runHooks runs hooks of one kind that were taken from libcontainer, all of them
// whatever becomes of the others.
func (c *builtinContainer) runHooks(name configs.HookName) error {
	list := c.hooks[name]
	if len(list) == 0 {
		return nil
	}
	state, err := c.lib.OCIState()
	if err != nil {
		return fmt.Errorf("%s hooks: %w", name, err)
	}
	if name == configs.Poststop {
		state.Status = specs.StateStopped
	}
	var errs []error
	_ = c.runtime.children.during(func() error {
		for _, hook := range list {
			if err := hook.Run(state); err != nil {
				errs = append(errs, fmt.Errorf("%s hook: %w", name, err))
			}
		}
		return nil
	})
	return errors.Join(errs...)
}

// loadHooks finds the hooks that were taken from a container of an earlier
// supervisor: they are in its bundle.
func (c *builtinContainer) loadHooks() error {
	bundle, _ := utils.SearchLabels(c.lib.Config().Labels, bundleLabel)
	spec, err := ReadSpec(bundle)
	if errors.Is(err, os.ErrNotExist) || err == nil && spec.Hooks == nil {
		return nil
	}
	if err != nil {
		return err
	}
	c.hooks = configs.Hooks{}
	for name, list := range map[configs.HookName][]specs.Hook{configs.Poststart: spec.Hooks.Poststart, configs.Poststop: spec.Hooks.Poststop} {
		for _, hook := range list {
			c.hooks[name] = append(c.hooks[name], configs.NewCommandHook(limited(hookCommand(hook), c.lib.ID())))
		}
	}
	return nil
}

// bundleLabel is where libcontainer keeps the bundle that hooks get in their state.
const bundleLabel = "bundle"

// nameBundle makes the bundle of the state that hooks get the container's own:
// libcontainer takes its working directory for it.
func nameBundle(config *configs.Config, bundle string) {
	config.Labels = slices.DeleteFunc(config.Labels, func(label string) bool { return strings.HasPrefix(label, bundleLabel+"=") })
	config.Labels = append(config.Labels, bundleLabel+"="+bundle)
}

// endHooks ends the hooks of a container, which run as children of this process,
// and with them its creation or start.
func (r *children) endHooks(id string) {
	for _, pid := range listChildren() {
		line, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cmdline") // it may have ended
		if words := strings.Split(string(line), "\x00"); len(words) > 3 && words[1] == HookCommand && words[2] == id {
			_ = syscall.Kill(pid, syscall.SIGTERM) // RunHook ends all of it
		}
	}
}
