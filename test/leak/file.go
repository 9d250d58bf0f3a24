package leak

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
)

// addEntries adds the entries of directories whose names are wanted.
func (s Snapshot) addEntries(kind Kind, dirs []string, wanted func(name string) bool) error {
	for _, dir := range dirs {
		entries, err := os.ReadDir(dir)
		if err != nil && !gone(err) {
			return err
		}
		for _, entry := range entries {
			if wanted(entry.Name()) {
				s.add(kind, entry.Name(), dir, "")
			}
		}
	}
	return nil
}

// addFiles adds everything below the directories, but what is in those kept.
func (s Snapshot) addFiles(dirs, kept []string) error {
	for _, dir := range dirs {
		err := walk(dir, func(path string, entry fs.DirEntry) {
			if path != dir && !slices.Contains(kept, filepath.Dir(path)) {
				s.add(File, path, "", entry.Type().String())
			}
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// walk visits a tree, the root included, and passes over what goes away while
// it is visited.
func walk(root string, visit func(path string, entry fs.DirEntry)) error {
	return filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if gone(err) {
			return nil
		}
		if err == nil {
			visit(path, entry)
		}
		return err
	})
}

// gone reports that a file or a process is not there any more. A /proc file of
// a process that is ending answers with ESRCH, a cgroup being removed with
// ENODEV.
func gone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) || errors.Is(err, unix.ENODEV)
}
