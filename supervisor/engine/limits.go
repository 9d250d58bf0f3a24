package engine

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/cgroups/fs2"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/supervisor/cgroup"
)

// limits are the files of a container's cgroups that an update may write, by
// path, with what they held.
type limits map[string]string

// limitFiles are their names, of both versions.
var limitFiles = [...]string{
	"cpu.shares", "cpu.cfs_period_us", "cpu.cfs_quota_us", "cpu.weight", "cpu.max",
	"cpuset.cpus", "cpuset.mems", "cpuset.cpus" + effective, "cpuset.mems" + effective,
	"memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max", "memory.swap.max",
	"hugetlb.*.limit_in_bytes", "hugetlb.*.max",
}

// effective ends the name of a file that says what is in force of another, which may be
// empty.
const effective = ".effective"

// readLimits reads them, and the files of version 2 that are named.
func readLimits(paths cgroup.Paths, unified map[string]string) limits {
	read := make(limits)
	for _, dir := range paths {
		for _, pattern := range limitFiles {
			found, _ := filepath.Glob(filepath.Join(dir, pattern)) // a good pattern
			for _, path := range found {
				read.add(path)
			}
		}
	}
	for name := range unified {
		read.add(filepath.Join(paths[""], name))
	}
	return read
}

// tryLimits sets resources in the files of version 2, before systemd is told of them,
// which keeps what the kernel refuses as properties of the unit, and writes it again
// when it likes: no undo would hold. On version 1 it does nothing, nor for a container
// without a cgroup of its own: fs2 would take that of this process for it.
func tryLimits(paths cgroup.Paths, r cgroups.Resources) error {
	if !cgroups.IsCgroup2UnifiedMode() || paths[""] == "" {
		return nil
	}
	r.SkipDevices = true
	// Version 2 takes a limit below what is in use, and kills for it.
	r.MemoryCheckBeforeUpdate = true
	m, err := fs2.NewManager(&cgroups.Cgroup{}, paths[""])
	if err != nil {
		return err
	}
	// Last, as it cannot be undone: a cpuset that has processes is not made empty again.
	last := cgroups.Resources{SkipDevices: true, CpusetCpus: r.CpusetCpus, CpusetMems: r.CpusetMems}
	r.CpusetCpus, r.CpusetMems = "", ""
	if err := m.Set(&r); err != nil {
		return err
	}
	return m.Set(&last)
}

// alone are the resources that are named, without those in force: a limit of swap needs
// that of memory, which it includes.
func alone(wanted *specs.LinuxResources) cgroups.Resources {
	var r cgroups.Resources
	apply(&r, wanted)
	if r.Memory == 0 {
		r.MemorySwap = 0
	}
	return r
}

func (l limits) add(path string) {
	if content, err := os.ReadFile(path); err == nil {
		l[path] = strings.TrimSpace(string(content))
	}
}

// restore writes back what has changed. It goes over the files more than once:
// a limit of memory alone and one of memory and swap bound each other.
func (l limits) restore() error {
	var failed []error
	for range 3 {
		failed = nil
		for path, content := range l {
			if strings.HasSuffix(path, effective) {
				continue
			}
			err := restoreLimit(path, content)
			if errors.Is(err, unix.ENOSPC) && content == "" { // a cpuset, see tryLimits
				err = restoreLimit(path, l[path+effective])
			}
			if err != nil {
				failed = append(failed, fmt.Errorf("put %s back: %w", path, err))
			}
		}
	}
	return errors.Join(failed...)
}

func restoreLimit(path, content string) error {
	now, err := os.ReadFile(path)
	if err != nil || strings.TrimSpace(string(now)) == content {
		return nil // its cgroup is gone, or it is as it was
	}
	return os.WriteFile(path, []byte(content+"\n"), 0)
}

// setOOMScoreAdj sets it for all processes of the container; undo puts the old
// values back.
func setOOMScoreAdj(paths cgroup.Paths, adjust int) (undo func() error, err error) {
	old := make(map[int]string)
	undo = func() error {
		var errs []error
		for pid, value := range old {
			errs = append(errs, writeOOMScoreAdj(pid, value))
		}
		return errors.Join(errs...)
	}
	for again := true; again; {
		again = false
		pids, err := paths.Processes()
		if err != nil {
			return nil, errors.Join(fmt.Errorf("set oom_score_adj: %w", err), undo())
		}
		for _, pid := range pids {
			if _, seen := old[pid]; seen {
				continue
			}
			again = true // it may have started another one meanwhile
			value, err := os.ReadFile(oomScoreAdjFile(pid))
			old[pid] = strings.TrimSpace(string(value))
			if err == nil {
				err = writeOOMScoreAdj(pid, strconv.Itoa(adjust))
			}
			if err != nil && !hasGone(err) {
				return nil, errors.Join(fmt.Errorf("set oom_score_adj: %w", err), undo())
			}
		}
	}
	return undo, nil
}

func oomScoreAdjFile(pid int) string { return fmt.Sprintf("/proc/%d/oom_score_adj", pid) }

func writeOOMScoreAdj(pid int, value string) error {
	err := os.WriteFile(oomScoreAdjFile(pid), []byte(value), 0)
	if hasGone(err) {
		return nil
	}
	return err
}

// hasGone reports whether a file of /proc says that its process has ended.
func hasGone(err error) bool { return errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) }
