package runner

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// mountPlace makes the directory of the runs, a tmpfs of its own: what is noted
// there is worth nothing after a reboot, is written for each plugin, and has to
// be written also while the volatile directory is full, or pods could not be
// deleted. Where runs of an earlier version are in the directory it stays what it
// is, until the next start.
func mountPlace(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make the directory of plugin runs: %w", err)
	}
	mounted, err := mountinfo.Mounted(dir)
	if err != nil {
		return fmt.Errorf("make the directory of plugin runs: %w", err)
	}
	names, err := runsIn(dir)
	if err != nil || mounted || len(names) > 0 {
		return err
	}
	if err := os.RemoveAll(filepath.Join(dir, pluginsName)); err != nil {
		return fmt.Errorf("make the directory of plugin runs: %w", err)
	}
	const size = 16 << 20 // a limit: what is not written costs nothing
	err = unix.Mount("plugin-runs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, fmt.Sprintf("mode=0700,size=%d", size))
	if err != nil {
		return fmt.Errorf("mount a tmpfs for the plugin runs on %s: %w", dir, err)
	}
	return nil
}

// runsIn are the names of the runs in their directory.
func runsIn(dir string) (names []string, err error) {
	entries, err := os.ReadDir(dir)
	for _, entry := range entries {
		if entry.Name() != pluginsName {
			names = append(names, entry.Name())
		}
	}
	return names, err
}

// Left are the files of the runs that are not over, for the log: verb, network
// and cgroup of each are in its request.json.
func (r *Runner) Left() (requests []string) {
	names, _ := runsIn(r.options.Dir) // what cannot be listed cannot be shown
	for _, name := range names {
		request, err := os.ReadFile(filepath.Join(r.options.Dir, name, "request.json"))
		requests = append(requests, fmt.Sprintf("%s: %s (%v)", name, request, err))
	}
	return requests
}

// Close removes what is kept for later runs. Runs that are left to the next daemon
// keep their cgroups and files, and the directory.
func (r *Runner) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var errs []error
	for _, group := range r.idle {
		errs = append(errs, group.Remove())
	}
	errs = append(errs, r.removeParent())
	r.idle, r.closed = nil, true
	names, err := runsIn(r.options.Dir)
	if err != nil || len(names) > 0 {
		return errors.Join(append(errs, err)...)
	}
	errs = append(errs, os.RemoveAll(r.pluginsDir()))
	if mounted, err := mountinfo.Mounted(r.options.Dir); err != nil || !mounted {
		return errors.Join(append(errs, err)...)
	}
	// Lazily: a process of a plugin may have its working directory there.
	return errors.Join(append(errs, unix.Unmount(r.options.Dir, unix.MNT_DETACH))...)
}
