package stats

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/test/harness"
)

// directories measures layers as the image store does, by walking a directory.
type directories string

func (d directories) SnapshotUsage(_ context.Context, id string) (image.Usage, error) {
	usage := image.Usage{Mountpoint: string(d), Time: time.Now()}
	err := filepath.WalkDir(filepath.Join(string(d), id), func(_ string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err == nil {
			usage.Inodes++
			usage.Bytes += uint64(info.Size())
		}
		return err
	})
	return usage, err
}

func newMeter(t *testing.T, source Layers) *Meter {
	m, err := Open(t.Context(), source, slog.New(slog.NewTextHandler(t.Output(), nil)))
	must(t, err)
	t.Cleanup(m.Close)
	return m
}

// own are the directories of a cgroup, one in each hierarchy.
func (h hierarchies) own(path string) []string {
	var dirs []string
	for _, controller := range []string{"cpu", "cpuacct", "memory", "pids", ""} {
		if directory := h.dir(controller, path); controller != "" || h.unified != "" {
			dirs = append(dirs, directory)
		}
	}
	slices.Sort(dirs)
	return slices.Compact(dirs)
}

// makeCgroup makes a cgroup in every hierarchy and returns its path.
func makeCgroup(t testing.TB, h hierarchies, name string) string {
	path := fmt.Sprintf("/minicri-stats-%d-%s", time.Now().UnixNano(), name)
	for _, directory := range h.own(path) {
		enableControllers(t, h, filepath.Dir(directory))
		must(t, os.Mkdir(directory, 0o755))
	}
	t.Cleanup(func() {
		all, err := cgroup.FindHierarchies()
		harness.Check(t, errors.Join(err, all.Remove(path, time.Minute)))
	})
	return path
}

// enableControllers does so on version 2, for those that are not on version 1.
func enableControllers(t testing.TB, h hierarchies, directory string) {
	if h.unified == "" || !strings.HasPrefix(directory, h.unified) {
		return
	}
	must(t, os.WriteFile(filepath.Join(directory, "cgroup.subtree_control"), []byte("+cpu +memory +pids"), 0))
}

// start starts a process in the cgroup, in all hierarchies, and ends it after the test.
func start(t *testing.T, h hierarchies, path string) {
	command := exec.Command("sh", "-c", "read go; head -c 1000000 /dev/zero; exec sleep 600") // what it holds then is the cgroup's
	stdin, err := command.StdinPipe()
	must(t, err)
	stdout, err := command.StdoutPipe()
	must(t, errors.Join(err, command.Start()))
	t.Cleanup(func() { _, _ = command.Process.Kill(), command.Wait() })
	for _, directory := range h.own(path) {
		must(t, os.WriteFile(directory+"/cgroup.procs", []byte(strconv.Itoa(command.Process.Pid)), 0))
	}
	_, err = fmt.Fprintln(stdin)
	must(t, err)
	_, err = io.CopyN(io.Discard, stdout, 1000000)
	must(t, err)
}

// kernel reads a number from a cgroup file, by other means than the meter. With a key it is that row of a table.
func kernel(t *testing.T, directory, name, key string) uint64 {
	content := harness.Read(t, filepath.Join(directory, name))
	fields := strings.Fields(string(content))
	if key != "" {
		fields = fields[slices.Index(fields, key)+1:]
	}
	number, err := strconv.ParseUint(fields[0], 10, 64)
	must(t, err)
	return number
}

// between fails unless low <= got <= high.
func between(t *testing.T, what string, low, got, high uint64) {
	harness.Want(t, got >= low && got <= high, "%s: got %d, the kernel says %d to %d", what, got, low, high)
}

func must(t testing.TB, err error) { t.Helper(); harness.Check(t, err) }
