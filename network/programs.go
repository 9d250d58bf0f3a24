package network

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/version"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
)

// programs caches what VERSION returned, by the path of a plugin's program. The zero value is ready for use.
type programs struct {
	mu    sync.Mutex
	known map[string]program
}

// program is the result of one VERSION. err means that the program cannot run. versions are nil if it gave no answer:
// then only its own error can show what it supports.
type program struct {
	file     string // the file's identity, see identity
	err      error
	versions []string
}

// identity changes with each change of a file's content. The modification time does not: installers set it.
func identity(info os.FileInfo) string {
	s := info.Sys().(*syscall.Stat_t)
	return fmt.Sprint(s.Dev, s.Ino, s.Size, s.Ctim, s.Mode)
}

func (p *programs) look(path string) program {
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return program{err: err}
	case info.Size() == 0:
		return program{err: fmt.Errorf("plugin %s is empty", path)}
	case unix.Access(path, unix.X_OK) != nil:
		return program{err: fmt.Errorf("plugin %[1]s is not executable: chmod +x %[1]s", path)}
	}
	file := identity(info)
	p.mu.Lock()
	known := p.known[path]
	p.mu.Unlock()
	if known.file == file {
		return known
	}
	found := program{file: file}
	ctx, cancel := context.WithTimeout(context.Background(), versionLimit)
	defer cancel()
	answer, err := invoke.GetVersionInfo(ctx, path, &versionExec{})
	if err == nil {
		found.versions = answer.SupportedVersions()
	}
	if failed, ok := errors.AsType[startError](err); ok {
		if errors.Is(err, unix.ETXTBSY) { // an installer is writing it
			return program{}
		}
		found.err = fmt.Errorf("plugin %s does not start: %w", path, failed.error)
		if errors.Is(err, unix.ENOEXEC) {
			found.err = fmt.Errorf("%w: it is for another architecture, or damaged", found.err)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.known == nil {
		p.known = make(map[string]program)
	}
	p.known[path] = found
	return found
}

// versionExec runs VERSION, which makes nothing: it needs no run with a cgroup.
type versionExec struct{ version.PluginDecoder }

type startError struct{ error }

func (e startError) Unwrap() error { return e.error }

func (*versionExec) FindInPath(plugin string, paths []string) (string, error) {
	return invoke.FindInPath(plugin, paths)
}

func (*versionExec) ExecPlugin(ctx context.Context, path string, stdin []byte, environment []string) ([]byte, error) {
	command := exec.CommandContext(ctx, path)
	command.Env, command.Stdin = environment, bytes.NewReader(stdin)
	command.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	command.Cancel = func() error { return unix.Kill(-command.Process.Pid, unix.SIGKILL) }
	command.WaitDelay = process.KillLimit / 10
	var answer bytes.Buffer
	command.Stdout = &answer
	if err := command.Start(); err != nil {
		return nil, startError{err}
	}
	if err := command.Wait(); err != nil {
		return nil, errors.New(strings.TrimSpace(answer.String())) // GetVersionInfo looks for a text of old plugins
	}
	return answer.Bytes(), nil
}

// unfit returns an error for each plugin of a network that cannot run its configuration. A thorough look misses the
// programs of IPAM plugins, too; without it they may be part of their plugin.
func (p *programs) unfit(c *Configuration, directories []string, thorough bool) (problems []error) {
	directories = searchedBy(c.Bytes, directories)
	look := func(name, what string, needed bool) {
		path, err := invoke.FindInPath(name, directories)
		if err != nil && !needed {
			return
		}
		var found program
		if err == nil {
			found = p.look(path)
			err = found.err
		}
		switch {
		case err != nil:
			err = fmt.Errorf("network %q: %s%w: install the plugin or set cni_bin_dir", c.Name, what, err)
		case found.versions != nil && !slices.Contains(found.versions, c.version()):
			err = &versionError{c, what + "plugin " + name + ", " + path + ",", found.versions}
		}
		if err != nil {
			problems = append(problems, err)
		}
	}
	for _, plugin := range chainOf(c.Bytes) {
		look(plugin.Type, "", true)
		if plugin.IPAM.Type != "" {
			look(plugin.IPAM.Type, "ipam: ", thorough)
		}
	}
	return problems
}

// versionError means that a plugin does not support the cniVersion of its configuration.
type versionError struct {
	*Configuration
	plugin   string
	versions []string
}

func (e *versionError) Error() string {
	return fmt.Sprintf("network %q: cniVersion %s is not supported by %s which supports %s: "+
		"write one of these into %s, or install a version of the plugin that supports it",
		e.Name, e.version(), e.plugin, strings.Join(e.versions, ", "), e.source())
}

// unsupported returns the errors of plugins that do not support the cniVersion, nil if all do.
func (p *programs) unsupported(c *Configuration, directories []string) error {
	return errors.Join(slices.DeleteFunc(p.unfit(c, directories, false), func(err error) bool {
		_, is := errors.AsType[*versionError](err)
		return !is
	})...)
}

// MissingPlugins returns the plugins of a network that have no program.
func MissingPlugins(config []byte, directories []string) (missing []string) {
	for _, plugin := range chainOf(config) {
		if _, err := invoke.FindInPath(plugin.Type, searchedBy(config, directories)); err != nil {
			missing = append(missing, plugin.Type)
		}
	}
	return missing
}

// Names returns the names of the networks that a directory configures.
func Names(directory string) (names []string) {
	good, _ := readDirectory(directory, nil)
	for _, c := range good {
		names = append(names, c.Name)
	}
	return names
}
