package network

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/minicri/minicri/internal/state"
)

// inUse begins the names of the files that keep the configuration which a directory
// has given last, for the next daemon: it may find the configuration's own file half
// written. That of the node's directory has no more in its name than the suffix.
const inUse, inUseSuffix = "network-in-use", ".json"

func (d *Directory) inUseFile() string {
	name := inUse
	if !d.isNodes() {
		sum := sha256.Sum256([]byte(d.path))
		name += fmt.Sprintf("-%x", sum[:8])
	}
	return filepath.Join(d.owner.options.Root, name+inUseSuffix)
}

// makeInUse makes the file: it is there from the start on, as all files of a node are.
func (d *Directory) makeInUse() {
	if _, err := os.Lstat(d.inUseFile()); !errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err := state.WriteFile(d.inUseFile(), []byte("{}"), false); err != nil {
		d.owner.options.Logger.Warn("the network in use will not be on disk: the next start will not know it", "dir", d.path, "err", err)
	}
}

// isFollowed reports whether the directory is one of those that are reloaded.
func (d *Directory) isFollowed() bool { return d.isNodes() || (*d.owner.others.Load())[d.path] == d }

// keepInUse keeps the configuration that is in use.
func (d *Directory) keepInUse(last, now *Configuration) {
	if now == nil || now.File == "" || last != nil && last.File == now.File && bytes.Equal(last.Bytes, now.Bytes) || !d.isFollowed() {
		return
	}
	data, err := json.Marshal(now)
	if kept, readErr := state.ReadFile(d.inUseFile()); readErr == nil && bytes.Equal(kept, data) {
		return // by the daemon before
	}
	if err == nil {
		err = state.WriteFile(d.inUseFile(), data, false)
	}
	if err != nil {
		d.owner.options.Logger.Warn("the network in use is not on disk: the next start does not know it", "network", now.Name, "err", err)
	}
}

// loadInUse starts with what an earlier daemon had in use.
func (d *Directory) loadInUse() {
	data, err := state.ReadFile(d.inUseFile())
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	var last Configuration
	if err = errors.Join(err, json.Unmarshal(data, &last)); err != nil {
		d.owner.options.Logger.Warn("the file that names the network in use cannot be read", "file", d.inUseFile(), "err", err)
		return
	}
	if filepath.Dir(last.File) == filepath.Clean(d.path) {
		d.current.Store(&snapshot{good: []*Configuration{&last}})
	}
}

// removeInUse removes what is kept of directories that the configuration does not
// name any more.
func (n *CNI) removeInUse() {
	entries, err := os.ReadDir(n.options.Root)
	used := make(map[string]bool)
	for _, d := range n.directories() {
		used[filepath.Base(d.inUseFile())] = true
	}
	for _, entry := range entries {
		name := entry.Name()
		if strings.HasPrefix(name, inUse+"-") && strings.HasSuffix(name, inUseSuffix) && !used[name] {
			err = errors.Join(err, os.Remove(filepath.Join(n.options.Root, name)))
		}
	}
	if err != nil {
		n.options.Logger.Warn("what was kept of configuration directories that are not used any more stays", "err", err)
	}
}
