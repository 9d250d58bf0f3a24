package network

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// snapshot is one look at the configuration directory. It is immutable.
type snapshot struct {
	configuration *Configuration
	problems      []error
	signature     string
	loaded        time.Time
}

// watch looks at the configuration directory again and again. Looking costs
// some microseconds; in return there is one mechanism for a file renamed in, a
// symlink switched, a directory removed and made again, and a network file
// system, each of which needs its own care with inotify(7).
func (n *CNI) watch(ctx context.Context) {
	ticker := time.NewTicker(n.options.Limits.Reload)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			n.Reload()
		}
	}
}

// Reload reads the configuration directory if anything in it has changed.
func (n *CNI) Reload() {
	signature := n.signature()
	last := n.current.Load()
	if last != nil && last.signature == signature {
		return
	}
	next := &snapshot{signature: signature, loaded: time.Now()}
	next.configuration, next.problems = readDirectory(n.options.ConfDir)
	if next.configuration == nil && n.options.Default.Enabled {
		next.configuration = n.defaultConfiguration(next)
	}
	n.current.Store(next)
	n.logChange(next)
	select {
	case n.changed <- struct{}{}:
	default:
	}
}

func (n *CNI) defaultConfiguration(next *snapshot) *Configuration {
	configuration, err := n.options.Default.configuration(n.PodCIDR())
	if err != nil {
		next.problems = append(next.problems, err)
	}
	return configuration
}

func (n *CNI) logChange(s *snapshot) {
	for _, problem := range s.problems {
		n.options.Logger.Warn("network configuration passed over", "err", problem)
	}
	if s.configuration == nil {
		n.options.Logger.Info("no network configuration", "dir", n.options.ConfDir)
		return
	}
	n.options.Logger.Info("network configuration loaded", "network", s.configuration.Name, "file", s.configuration.File)
}

// signature changes whenever a file that the configuration may be read from
// does: names, sizes, times and inodes, with symlinks followed. Folders are
// looked into once, because a list may take its plugins from one.
func (n *CNI) signature() string {
	var b strings.Builder
	fmt.Fprintln(&b, n.PodCIDR())
	n.describe(&b, n.options.ConfDir, true)
	return b.String()
}

func (n *CNI) describe(b *strings.Builder, directory string, descend bool) {
	entries, err := os.ReadDir(directory)
	if err != nil {
		fmt.Fprintln(b, err)
		return
	}
	for _, entry := range entries {
		path := filepath.Join(directory, entry.Name())
		info, err := os.Stat(path)
		if err != nil {
			fmt.Fprintln(b, err)
			continue
		}
		fmt.Fprintln(b, path, info.Size(), info.ModTime().UnixNano(), inode(info))
		if info.IsDir() && descend {
			n.describe(b, path, false)
		}
	}
}

// Configuration is what the next pod gets, or an error that says why there is
// none.
func (n *CNI) Configuration() (*Configuration, error) {
	if s := n.current.Load(); s.configuration != nil {
		return s.configuration, nil
	}
	n.Reload()
	s := n.current.Load()
	if s.configuration == nil {
		return nil, n.noConfiguration(s)
	}
	return s.configuration, nil
}

func (n *CNI) noConfiguration(s *snapshot) error {
	text := make([]string, 0, len(s.problems))
	for _, problem := range s.problems {
		text = append(text, problem.Error())
	}
	if len(text) == 0 {
		text = append(text, "put a .conflist there, or set default_network.enabled")
	}
	return fmt.Errorf("%w in %s: %s", ErrNoConfiguration, n.options.ConfDir, strings.Join(text, "; "))
}

// Problems are the files of the configuration directory that were passed
// over, each with its reason.
func (n *CNI) Problems() []error { return n.current.Load().problems }
