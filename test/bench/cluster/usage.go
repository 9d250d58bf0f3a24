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
	cost "github.com/minicri/minicri/test/bench/contender"
)

// usage is of all processes of a runtime: daemon and shims. What holds a pod's
// namespaces, pause, is not counted for either.
type usage struct {
	cpu         time.Duration
	mebibytes   float64 // what the node cannot take back
	descriptors int
	// daemons and shims are how many processes that is of.
	daemons, shims int
}

// daemons and shims are the programs of runtimes by the names of their files.
var (
	daemons = []string{"minicri", "containerd"}
	shims   = []string{"minicri-shim", "containerd-shim-runc-v2"}
)

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
		// Each cluster has pods of its own: a runtime of which one kind is not found is
		// not measured.
		if all.daemons == 0 || all.shims == 0 {
			return usage{}, fmt.Errorf("cluster %s has %d daemons and %d shims among its %d processes: one of each has to be there", cluster, all.daemons, all.shims, len(pids))
		}
		return all, nil
	}
}

// programOf is the name of the file that a process executes, of one in memory
// (memfd_create(2)) that of the memory.
func programOf(pid int) (string, error) {
	path, err := os.Readlink(filepath.Join("/proc", strconv.Itoa(pid), "exe"))
	return strings.TrimPrefix(filepath.Base(strings.TrimSuffix(path, " (deleted)")), "memfd:"), err
}

func (u *usage) add(pid int) error {
	dir := filepath.Join("/proc", strconv.Itoa(pid))
	program, err := programOf(pid)
	switch {
	case err != nil:
		return err
	case slices.Contains(daemons, program):
		u.daemons++
	case slices.Contains(shims, program):
		u.shims++
	default:
		return nil
	}
	cpu, err := cost.CPU(pid)
	if err != nil {
		return err
	}
	u.cpu += cpu
	kibibytes, err := cost.Memory(pid)
	if err != nil {
		return err
	}
	u.mebibytes += float64(kibibytes) / 1024
	open, err := os.ReadDir(filepath.Join(dir, "fd"))
	u.descriptors += len(open)
	return err
}
