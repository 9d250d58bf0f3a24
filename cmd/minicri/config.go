package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/containerd"
	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/internal/manual"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/redact"
	"github.com/minicri/minicri/network"
	"github.com/minicri/minicri/sandbox"
)

func configCommand(ctx context.Context, arguments []string, output io.Writer) error {
	if len(arguments) == 0 {
		return misused("config: default, check or show? `minicri help config`")
	}
	l, words, err := config.Read(arguments[1:], output)
	if err != nil {
		return usageError{err}
	}
	switch verb := arguments[0]; {
	case verb == "default" && len(words) == 0:
		return config.Default().Write(output)
	case verb == "check" && len(words) <= 1:
		flags := arguments[1:]
		if len(words) == 1 {
			flags = slices.Concat(flags, []string{"--config", words[0]})
		}
		return checkConfig(ctx, flags, output)
	case verb == "show" && len(words) == 0:
		running, err := runningConfig(ctx, l.Socket)
		return errors.Join(showConfig(output, l, running), l.Strict(), about("ask the daemon for its configuration", err))
	case verb == "from-containerd" && len(words) == 1:
		data, err := os.ReadFile(words[0])
		if err == nil {
			data, err = containerd.Convert(data)
		}
		if err != nil {
			return fmt.Errorf("convert %s: %w", words[0], err)
		}
		_, err = output.Write(data)
		return err
	default:
		return misused("usage: minicri config default, config check [FILE], config show or config from-containerd FILE")
	}
}

// checkConfig reports what a daemon with these flags would refuse on this machine, and unknown keys.
func checkConfig(ctx context.Context, flags []string, output io.Writer) error {
	l, _, err := config.Read(flags, output)
	if err != nil {
		return usageError{err}
	}
	m, err := machine.Read(l.Root)
	if err != nil {
		return err
	}
	running, err := runningConfig(ctx, l.Socket)
	if err != nil {
		running = map[string]any{} // one serves, and does not say what
	}
	_, err = findShim(l.Shim)
	problems := slices.Concat(preflight(l.Config, m), obstacles(ctx, l.Config, running), []error{about("shim", err)})
	file := config.File(flags)
	if err := errors.Join(l.Strict(), errors.Join(located(l, problems)...)); err != nil {
		return fmt.Errorf("%s is not good:\n%w", file, err)
	}
	if _, err := os.Stat(file); errors.Is(err, os.ErrNotExist) { // no flag names it
		file = "the configuration without " + file
	}
	_, err = fmt.Fprintln(output, file, "is valid")
	return err
}

// showConfig prints each value and its source. running is from runningConfig.
func showConfig(output io.Writer, l *config.Loaded, running map[string]any) error {
	document, err := json.Marshal(l.Config)
	if err != nil {
		return err
	}
	now, err := keysIn(document)
	if err != nil {
		return err
	}
	for _, v := range l.Values() {
		source := v.Source
		if running != nil && !reflect.DeepEqual(running[v.Name], now[v.Name]) {
			has := fmt.Sprint(running[v.Name])
			if slices.Contains([]string{"", "<nil>", "[]"}, has) {
				has = "none"
			}
			source += fmt.Sprintf("; the daemon that runs has %s: by a flag of its own, or until it reads this or is restarted", has)
		}
		if _, err := fmt.Fprintf(output, "%s = %s  # %s\n", v.Name, redact.Line(v.Text), redact.Line(source)); err != nil {
			return err
		}
	}
	return nil
}

type call struct {
	*config.Loaded
	words []string
	flags *flag.FlagSet
}

func (c call) text(flag string) string { return c.flags.Lookup(flag).Value.String() }
func (c call) has(flag string) bool    { return c.text(flag) == "true" }

// look reads the configuration. It reports what is wrong with it, and the command goes on.
func look(ctx context.Context, command string, arguments []string) (c call, err error) {
	c.Loaded, c.words, err = config.Read(arguments, os.Stderr, func(set *flag.FlagSet) {
		manual.Flags(command, set)
		c.flags = set
	})
	if err != nil {
		return c, usageError{err}
	}
	for _, problem := range slices.Concat(c.Unknown, c.Broken) {
		fmt.Fprintf(os.Stderr, "minicri: %s; this goes on without it\n", redact.Line(problem.Error()))
	}
	newLogger(c.Config)     // libraries log little
	if command != "check" { // which looks at the files of the configuration
		c.State, err = stateOf(ctx, c.Loaded)
	}
	return c, err
}

// apply puts the reloadable keys into force. If NRI refuses its keys, c gets those in force instead.
func (n *parts) apply(c *config.Config) error {
	n.runtime.Sandboxes.SetLimits(sandboxLimits(c))
	n.supervisors.SetAnswer(time.Duration(c.Limits.Kill))
	n.runtime.Networks.SetLimits(networkLimits(c))
	n.runtime.Networks.SetDefault(network.DefaultNetwork(c.DefaultNetwork))
	n.runtime.Info.Handlers.Replace(handlerSpecs(c))
	n.images.Reconfigure(imageConfig(c, nil))
	err := n.runtime.Plugins.Reconfigure(nriOptions(c, nil, nil))
	if err != nil {
		now := n.runtime.Plugins.InForce()
		if c.NRI.Enabled = now.Enabled; now.Enabled {
			c.NRI.Socket, c.NRI.PluginDir, c.NRI.ConfigDir = now.Socket, now.PluginDir, now.ConfigDir
		}
	}
	return err
}

// reload tells systemd its beginning and end (sd_notify(3)). A broken configuration changes nothing.
func (d *serving) reload() {
	notify(d.logger, fmt.Sprintf("RELOADING=1\nMONOTONIC_USEC=%d", process.Monotonic().Microseconds()))
	defer notify(d.logger, daemon.SdNotifyReady)
	whole, err := d.reloadFiles()
	if err != nil {
		d.logger.Error("the configuration cannot be reloaded: it stays as it was", "err", err)
	}
	d.node.metrics.ObserveReload(whole)
}

// reloadFiles reports whether all reloadable keys are in force.
func (d *serving) reloadFiles() (whole bool, err error) {
	l, err := loadForServing(d.arguments)
	if err != nil {
		return false, err
	}
	fresh := l.Config
	warnOfUnknown(l, d.logger)
	level, _ := fresh.Level() // Read has checked it
	of, err := handlerDefaults(fresh, d.node.defaults)
	if err != nil {
		return false, err
	}
	d.level.Set(level)
	if err = d.node.apply(fresh); err != nil {
		d.logger.Error("NRI cannot be reloaded, all other keys can: correct nri, or free what it needs, and send SIGHUP", "nri.enabled", fresh.NRI.Enabled, "err", err)
	}
	whole = err == nil
	d.node.runtime.Containers.SetHandlerDefaults(of)
	before := d.node.inForce.Load()
	d.node.inForce.Store(before.Reloaded(fresh))
	var applied, restart []string
	for _, key := range changedKeys(reflect.ValueOf(before).Elem(), reflect.ValueOf(fresh).Elem(), "") {
		if config.IsReloaded(key) {
			applied = append(applied, key)
		} else {
			restart = append(restart, key)
		}
	}
	if len(restart) > 0 {
		d.logger.Warn("configuration reloaded; some keys have changed that need a restart of the daemon", "applied", applied, "keys", restart)
	} else {
		d.logger.Info("configuration reloaded", "applied", applied)
	}
	return whole, nil
}

// stamp changes with the configuration's files.
func stamp(arguments []string) string {
	var b strings.Builder
	file := config.File(arguments)
	for _, path := range append([]string{file}, config.DropIns(file)...) {
		if info, err := os.Stat(path); err == nil {
			fmt.Fprintln(&b, path, info.Size(), info.ModTime().UnixNano())
		}
	}
	return b.String()
}

func sandboxLimits(c *config.Config) sandbox.Limits {
	l := c.Limits
	return sandbox.Limits{Run: time.Duration(l.Run), Destroy: time.Duration(l.Destroy), Create: time.Duration(l.Create), Kill: time.Duration(l.Kill)}
}

func networkLimits(c *config.Config) network.Limits {
	l := c.Limits
	return network.Limits{
		Add: time.Duration(l.CNIAdd), Del: time.Duration(l.CNIDel), Check: time.Duration(l.CNICheck),
		Status: time.Duration(l.CNIStatus), GC: time.Duration(l.CNIGC),
		DetachTries: l.DetachTries, DetachTime: time.Duration(l.DetachTime),
		GiveUpTries: l.GiveUpTries, GiveUpTime: time.Duration(l.GiveUpTime),
		RetryFirst: time.Duration(l.RetryFirst), RetryMost: time.Duration(l.RetryMost),
		Reload: time.Duration(l.Reload), StatusPeriod: time.Duration(l.Status), GCPeriod: time.Duration(l.GC), CheckPeriod: time.Duration(l.Check),
	}
}
