package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/containerd"
	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/internal/manual"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/redact"
	"github.com/minicri/minicri/network"
	"github.com/minicri/minicri/sandbox"
)

func configDefaultCommand(cmd *cobra.Command, _ []string) error {
	return config.Default().Write(cmd.OutOrStdout())
}

func configConvertCommand(cmd *cobra.Command, arguments []string) error {
	data, err := os.ReadFile(arguments[0])
	if err != nil {
		return fmt.Errorf("convert a configuration of containerd: %w", err)
	}
	converted, err := containerd.Convert(data)
	if err != nil {
		return fmt.Errorf("convert %s: %w", arguments[0], err)
	}
	_, err = cmd.OutOrStdout().Write(converted)
	return err
}

func configShowCommand(cmd *cobra.Command, _ []string) error {
	l := config.Load(cmd.Flags())
	running, err := runningConfig(cmd.Context(), l.Socket)
	return errors.Join(showConfig(cmd.OutOrStdout(), l, running), l.Strict(), about("ask the daemon for its configuration", err))
}

// configCheckCommand reports unknown keys, and values that a daemon with these flags would refuse on this machine.
func configCheckCommand(cmd *cobra.Command, arguments []string) error {
	if len(arguments) == 1 {
		if err := cmd.Flags().Set("config", arguments[0]); err != nil {
			return err
		}
	}
	l := config.Load(cmd.Flags())
	m, err := machine.Read(l.Root)
	if err != nil {
		return err
	}
	running, err := runningConfig(cmd.Context(), l.Socket)
	if err != nil {
		running = map[string]any{} // a daemon serves, and does not return its configuration
	}
	_, err = findShim(l.Shim)
	problems := slices.Concat(preflight(l.Config, m), obstacles(cmd.Context(), l.Config, running), []error{about("shim", err)})
	file := cmp.Or(config.File(cmd.Flags()), config.DefaultFile)
	if err := errors.Join(l.Strict(), errors.Join(located(l, problems)...)); err != nil {
		return fmt.Errorf("%s has errors:\n%w", file, err)
	}
	subject := file
	if _, err := os.Stat(file); errors.Is(err, os.ErrNotExist) { // no flag names it
		subject = "the configuration without " + file
	}
	if files := len(config.DropIns(file)); files > 0 {
		subject = fmt.Sprintf("%s with %d drop-ins", subject, files)
	}
	_, err = fmt.Fprintln(cmd.OutOrStdout(), subject, "is valid")
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

// call is one run of a command that works with a configuration.
type call struct {
	*config.Loaded
	flags *pflag.FlagSet
}

func (c call) text(flag string) string { return c.flags.Lookup(flag).Value.String() }
func (c call) has(flag string) bool    { return c.text(flag) == "true" }

// form is the form of a list: table, json or yaml.
func (c call) form() (string, error) {
	form := cmp.Or(c.text("output"), "table")
	if f := c.flags.Lookup("json"); f != nil && f.Changed {
		if c.flags.Changed("output") && form != "json" {
			return "", manual.Misused("--json and -o %s contradict each other: give one of them", form)
		}
		form = "json"
	}
	if !slices.Contains([]string{"table", "json", "yaml"}, form) {
		return "", manual.Misused("-o %s: the forms are table, json and yaml", form)
	}
	return form, nil
}

// look reads the configuration. It reports problems of it on stderr, and the command continues.
func look(cmd *cobra.Command) (call, error) {
	c := call{config.Load(cmd.Flags()), cmd.Flags()}
	for _, problem := range slices.Concat(c.Unknown, c.Broken) {
		fmt.Fprintf(os.Stderr, "minicri: %s; the command continues without it\n", redact.Line(problem.Error()))
	}
	if c.flags.Lookup("json") != nil {
		if _, err := c.form(); err != nil {
			return c, err
		}
	}
	newLogger(c.Config) // libraries log little
	if cmd.Name() == "check" {
		return c, nil // it examines the directories of the configuration
	}
	state, err := stateOf(cmd.Context(), c.Loaded)
	c.State = state
	return c, err
}

// apply puts the reloadable keys into force. If NRI refuses its keys, c gets those in force instead.
func (n *parts) apply(c *config.Config) error {
	n.runtime.Sandboxes.SetLimits(sandboxLimits(c))
	n.supervisors.SetAnswer(time.Duration(c.Limits.Kill))
	n.runtime.Networks.SetLimits(networkLimits(c))
	n.runtime.Networks.SetDefault(network.DefaultNetwork(c.DefaultNetwork))
	n.runtime.Info.Handlers.Replace(handlerSpecs(c))
	n.runtime.Networks.Keep(c.CNIConfDirs())
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
	l := config.Load(d.flags)
	if err := errors.Join(l.Broken...); err != nil {
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
		d.logger.Warn("configuration reloaded; some keys have changed that need a restart of the daemon", "applied", applied,
			"restart_needed", restart)
	} else {
		d.logger.Info("configuration reloaded", "applied", applied)
	}
	return whole, nil
}

// stamp changes with the configuration's files.
func stamp(flags *pflag.FlagSet) string {
	var b strings.Builder
	file := cmp.Or(config.File(flags), config.DefaultFile)
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
		AtOnce: l.CNIAtOnce, DetachTries: l.DetachTries, DetachTime: time.Duration(l.DetachTime),
		GiveUpTries: l.GiveUpTries, GiveUpTime: time.Duration(l.GiveUpTime),
		RetryFirst: time.Duration(l.RetryFirst), RetryMost: time.Duration(l.RetryMost),
		Reload: time.Duration(l.Reload), StatusPeriod: time.Duration(l.Status), GCPeriod: time.Duration(l.GC), CheckPeriod: time.Duration(l.Check),
	}
}
