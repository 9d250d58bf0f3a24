package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/test/bench/contender"
)

// usage is of all processes of a runtime: daemon and shims. What holds a pod's namespaces,
// pause, is not counted for either.
type usage struct {
	cpu                    time.Duration
	mebibytes, descriptors float64 // memory that the node cannot take back
}

// isShim are the programs of runtimes by the names of their files.
var isShim = map[string]bool{"minicri": false, "containerd": false, "minicri-shim": true, "containerd-shim-runc-v2": true}

// usageOf finds a cluster's by the cgroups of its node: what the runtime starts is in there, wherever its parent is.
func usageOf(cluster string) (u usage) {
	pids := contender.Must(contender.Must(cgroup.FindHierarchies()).Processes("/minicri-cluster-" + cluster))
	found := map[bool]bool{}
	for _, pid := range pids {
		proc := fmt.Sprintf("/proc/%d/", pid)
		program, _ := os.Readlink(proc + "exe") // one that has ended has none; of one in memory it is that memory's (memfd_create(2))
		shim, ours := isShim[strings.TrimPrefix(filepath.Base(strings.TrimSuffix(program, " (deleted)")), "memfd:")]
		if !ours {
			continue
		}
		found[shim] = true
		open, _ := os.ReadDir(proc + "fd")
		u.cpu += contender.CPU(pid, false)
		u.mebibytes += float64(contender.Memory(pid)) / 1024
		u.descriptors += float64(len(open))
	}
	// Each cluster has pods of its own: a runtime of which one kind is not found is not measured.
	if len(found) != 2 {
		contender.Check(fmt.Errorf("cluster %s: a daemon and a shim have to be among its %d processes: %v", cluster, len(pids), found))
	}
	return u
}
