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

// settled is how old the last change of a directory has to be before the next one is
// sure to change its time: file systems count time in ticks.
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

// pluginsName is the directory of the links that all runs share, next to the runs.
const pluginsName = ".plugins"

func (r *Runner) pluginsDir() string { return filepath.Join(r.options.Dir, pluginsName) }

// link sees to it that each plugin that is installed, and each that is asked for,
// is a link to the program: the program reports one that is missing. Links stay
// for the plugins of later runs.
func (r *Runner) link(installed map[string]string, asked []string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, err := os.Lstat(r.pluginsDir()); errors.Is(err, fs.ErrNotExist) {
		r.linked = make(map[string]bool)
		if err := os.Mkdir(r.pluginsDir(), 0o700); err != nil {
			return err
		}
	}
	var errs []error
	for name := range installed {
		if !r.linked[name] {
			errs = append(errs, r.linkOne(name))
		}
	}
	for _, name := range asked { // these are needed: one may have been removed by hand
		if filepath.Base(name) == name && name != "." && name != ".." { // libcni refuses what is no name of a file
			errs = append(errs, r.linkOne(name))
		}
	}
	return errors.Join(errs...)
}

// linkOne makes one link, in the place of one to another program that an earlier
// daemon made; mu is held.
func (r *Runner) linkOne(name string) error {
	path := filepath.Join(r.pluginsDir(), name)
	err := os.Symlink(r.options.Program, path)
	if errors.Is(err, fs.ErrExist) {
		if to, readErr := os.Readlink(path); readErr != nil || to != r.options.Program {
			err = errors.Join(os.Remove(path), os.Symlink(r.options.Program, path))
		} else {
			err = nil
		}
	}
	if err == nil {
		r.linked[name] = true
	}
	return err
}
