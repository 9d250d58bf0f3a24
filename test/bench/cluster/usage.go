package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/minicri/minicri/internal/cgroup"
)

// usage is of all processes of a runtime: daemon and shims. What holds a pod's
// namespaces, pause, is not counted for either.
type usage struct {
	cpu         time.Duration
	mebibytes   float64 // proportional set size
	descriptors int
}

// programs are a runtime's by the names of their files.
var programs = []string{"minicri", "minicri-shim", "containerd", "containerd-shim-runc-v2"}

// processesOf finds a cluster's by the cgroups of its node: what the runtime starts
// is in there, wherever its parent is.
func processesOf(cluster string) func() (usage, error) {
	return func() (usage, error) {
		hierarchies, err := cgroup.FindHierarchies()
		if err != nil {
			return usage{}, err
		}
		pids, err := hierarchies.Processes("/minicri-cluster-" + cluster)
		if err != nil {
			return usage{}, err
		}
		var all usage
		for _, pid := range pids {
			if err := all.add(pid); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return usage{}, err
			}
		}
		return all, nil
	}
}

func (u *usage) add(pid int) error {
	dir := filepath.Join("/proc", strconv.Itoa(pid))
	program, err := os.Readlink(filepath.Join(dir, "exe"))
	if err != nil || !slices.Contains(programs, filepath.Base(strings.TrimSuffix(program, " (deleted)"))) {
		return err
	}
	stat, err := os.ReadFile(filepath.Join(dir, "stat"))
	if err != nil {
		return err
	}
	// proc_pid_stat(5): the name may have spaces, utime and stime are the 12th and
	// 13th field after it, in ticks of 10 ms.
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	for _, field := range fields[11:13] {
		ticks, err := strconv.Atoi(field)
		if err != nil {
			return fmt.Errorf("%s/stat: %w", dir, err)
		}
		u.cpu += time.Duration(ticks) * 10 * time.Millisecond
	}
	rollup, err := os.ReadFile(filepath.Join(dir, "smaps_rollup"))
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(rollup)) {
		if value, ok := strings.CutPrefix(line, "Pss:"); ok {
			kibibytes, err := strconv.Atoi(strings.Fields(value)[0])
			if err != nil {
				return fmt.Errorf("%s/smaps_rollup: %w", dir, err)
			}
			u.mebibytes += float64(kibibytes) / 1024
		}
	}
	open, err := os.ReadDir(filepath.Join(dir, "fd"))
	u.descriptors += len(open)
	return err
}
