package nri

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/containerd/nri/pkg/api"
)

// Survey returns the plugins of the directory that can be started, as INDEX-NAME,
// and what is wrong with the others. Where NRI is off there is nothing to say.
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
		if err := s.check(entry.Name()); err != nil {
			problems = append(problems, fmt.Errorf("NRI plugin %s is not started: %w", filepath.Join(s.PluginDir, entry.Name()), err))
			continue
		}
		plugins = append(plugins, entry.Name())
	}
	return plugins, problems
}

// check fails for a plugin for which the library would start none.
func (s Source) check(file string) error {
	index, name, err := api.ParsePluginName(file)
	if err != nil {
		return fmt.Errorf("its name is not an index of two digits, '-' and a name, as in 10-logger: %w", err)
	}
	for _, configuration := range []string{index + "-" + name, name} {
		path := filepath.Join(s.ConfigDir, configuration+".conf")
		info, err := os.Stat(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil && !info.Mode().IsRegular() { // a fifo would not let go of who reads it
			err = fmt.Errorf("%s is no regular file", path)
		}
		if err == nil {
			_, err = os.ReadFile(path)
		}
		if err != nil {
			return fmt.Errorf("its configuration: %w", err)
		}
		return nil
	}
	return nil
}

// choose returns the directory whose plugins the library starts: that of the
// configuration, or one with links to those of it that can be started. Of a directory
// with a file that it does not like, the library starts none.
func (p *Plugins) choose(source Source) (dir string, err error) {
	plugins, problems := source.Survey()
	for _, problem := range problems {
		p.options.Logger.Warn("an NRI plugin is skipped", "err", problem)
	}
	p.mu.Lock()
	p.launched, p.skipped = plugins, problems
	p.mu.Unlock()
	links := filepath.Join(p.options.State, "nri-plugins")
	if err := os.RemoveAll(links); err != nil || len(problems) == 0 {
		return source.PluginDir, err
	}
	if err := os.Mkdir(links, 0o700); err != nil {
		return "", err
	}
	for _, plugin := range plugins {
		if err := os.Symlink(filepath.Join(source.PluginDir, plugin), filepath.Join(links, plugin)); err != nil {
			return "", err
		}
	}
	return links, nil
}

// Problems are the plugins of the directory that were not started, and those of them
// that are not among the connected.
func (p *Plugins) Problems(connected []string) (problems []error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	problems = append(problems, p.skipped...)
	for _, plugin := range p.launched {
		if !slices.Contains(connected, plugin) {
			problems = append(problems, fmt.Errorf("NRI plugin %s is not connected: it did not start, or has ended; the log says why", plugin))
		}
	}
	return problems
}
