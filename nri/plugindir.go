package nri

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/containerd/nri/pkg/api"
	nrinet "github.com/containerd/nri/pkg/net"

	"github.com/minicri/minicri/internal/process"
)

// Survey returns the plugins that can be started, as INDEX-NAME, and what is wrong with the others.
func (s Source) Survey() (plugins []string, problems []error) {
	if !s.Enabled {
		return nil, nil
	}
	entries, err := os.ReadDir(s.PluginDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		problems = append(problems, fmt.Errorf("no NRI plugin is started (nri.plugin_dir): %w", err))
	}
	for _, entry := range entries {
		if info, err := entry.Info(); err != nil || info.IsDir() || info.Mode()&0o111 == 0 {
			continue // no program, or just removed
		}
		if _, err := s.configurationOf(entry.Name()); err != nil {
			problems = append(problems, fmt.Errorf("NRI plugin %s is not started: %w", filepath.Join(s.PluginDir, entry.Name()), err))
			continue
		}
		plugins = append(plugins, entry.Name())
	}
	return plugins, problems
}

// configurationOf returns a plugin's configuration, "" for none. It fails if it cannot be started.
func (s Source) configurationOf(file string) (string, error) {
	index, name, err := api.ParsePluginName(file)
	if err != nil {
		return "", fmt.Errorf("its name is not an index of two digits, '-' and a name, as in 10-logger: %w", err)
	}
	for _, configuration := range []string{index + "-" + name, name} {
		path := filepath.Join(s.ConfigDir, configuration+".conf")
		info, err := os.Stat(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil && !info.Mode().IsRegular() { // reading a FIFO would hang
			err = fmt.Errorf("%s is no regular file", path)
		}
		if err != nil {
			return "", fmt.Errorf("its configuration: %w", err)
		}
		content, err := os.ReadFile(path)
		return string(content), err
	}
	return "", nil
}

// launchAll starts the plugins of the directory side by side, and waits until each joins or fails.
func (p *Plugins) launchAll(d *door, source Source) {
	plugins, problems := source.Survey()
	var links []*link
	for _, plugin := range plugins {
		l, err := launch(source, plugin)
		if err != nil {
			problems = append(problems, fmt.Errorf("NRI plugin %s is not started: %w", filepath.Join(source.PluginDir, plugin), err))
			continue
		}
		links = append(links, l)
		d.enter(l)
	}
	for _, problem := range problems {
		p.options.Logger.Warn("an NRI plugin is skipped", "err", problem)
	}
	d.mu.Lock()
	d.skipped = problems
	for _, l := range links {
		d.launched = append(d.launched, l.name)
	}
	d.mu.Unlock()
	for _, l := range links {
		<-l.settled
	}
}

// launch starts a plugin in its own process group, connected by its descriptor 3.
func launch(source Source, plugin string) (*link, error) {
	config, err := source.configurationOf(plugin)
	if err != nil {
		return nil, err
	}
	index, name, _ := api.ParsePluginName(plugin) // as configurationOf has
	l := &link{name: plugin, config: config}
	pair, err := nrinet.NewSocketPair()
	if err != nil {
		return nil, err
	}
	defer pair.Close()
	if l.plugin, err = pair.LocalConn(); err != nil {
		return nil, err
	}
	l.command = exec.Command(filepath.Join(source.PluginDir, plugin))
	l.command.ExtraFiles = []*os.File{pair.PeerFile()}
	l.command.Env = []string{api.PluginNameEnvVar + "=" + name, api.PluginIdxEnvVar + "=" + index, api.PluginSocketEnvVar + "=3"}
	l.command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := l.command.Start(); err != nil {
		_ = l.plugin.Close()
		return nil, err
	}
	l.release = process.Hold(l.command.Process.Pid)
	return l, nil
}

// Problems returns the errors of plugins that were skipped, and of those that should be connected.
func (p *Plugins) Problems(connected []string) (problems []error) {
	problem := func(format, plugin string) { problems = append(problems, fmt.Errorf(format, plugin)) }
	if d := p.door.Load(); d != nil {
		d.mu.Lock()
		defer d.mu.Unlock()
		problems = append(problems, d.skipped...)
		for _, plugin := range d.launched {
			if !slices.Contains(connected, plugin) {
				problem("NRI plugin %s is not connected: it did not start, or has ended; the log says why", plugin)
			}
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for plugin := range p.away {
		if !slices.Contains(connected, plugin) {
			problem("NRI plugin %s was disconnected when NRI was switched off or over, and has not come back: start it again, or restart minicri if it is to stay away", plugin)
		}
	}
	for _, required := range p.missing(connected) {
		problem("the required NRI plugin %s is not connected (nri.required_plugins): pods are refused", required)
	}
	return problems
}
