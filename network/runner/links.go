package runner

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/invoke"
	"golang.org/x/sys/unix"
)

// settled is how old the last change of a directory has to be for its times to
// tell of the next one: file systems count time in ticks.
const settled = time.Second

// installed are the plugins that the directories have, by name, each with its
// program; the directories are listed when they have changed. A list that lacks
// some (EMFILE, EIO) is worse than none: it would be kept.
func (r *Runner) installed() (map[string]string, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	signature, stable := r.signature()
	if signature == r.listed {
		return r.programs, nil
	}
	programs := make(map[string]string)
	for _, dir := range r.options.BinDirs {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTDIR) {
			return nil, fmt.Errorf("list the plugins that are installed: %w", err)
		}
		for _, entry := range entries {
			if program, err := invoke.FindInPath(entry.Name(), r.options.BinDirs); err == nil {
				programs[entry.Name()] = program
			}
		}
	}
	r.programs, r.listed = programs, ""
	if stable {
		r.listed = signature
	}
	return programs, nil
}

func (r *Runner) signature() (signature string, stable bool) {
	var b strings.Builder
	stable = true
	for _, dir := range r.options.BinDirs {
		info, err := os.Stat(dir)
		if err != nil {
			fmt.Fprintln(&b, err)
			continue
		}
		fmt.Fprintln(&b, dir, info.ModTime().UnixNano())
		stable = stable && time.Since(info.ModTime()) > settled
	}
	return b.String(), stable
}

// link makes the directory of a run's plugins: each that is installed, and each
// that is asked for, is the runner. It tells of one that is missing.
func (run *Run) link(program string, installed map[string]string) error {
	if err := os.Mkdir(run.PluginDir(), 0o700); err != nil {
		return err
	}
	var errs []error
	for name := range installed {
		errs = append(errs, os.Symlink(program, filepath.Join(run.PluginDir(), name)))
	}
	for _, name := range run.Plugins {
		// libcni refuses what is no name of a file.
		if path := filepath.Join(run.PluginDir(), name); filepath.Base(path) == name && installed[name] == "" {
			if err := os.Symlink(program, path); !errors.Is(err, os.ErrExist) {
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}
