package main

import (
	"fmt"
	"os"
	"reflect"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/network"
	"github.com/minicri/minicri/sandbox"
)

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
	level, err := fresh.Level()
	if err != nil {
		return false, err
	}
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
