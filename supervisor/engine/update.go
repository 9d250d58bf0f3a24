package engine

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/cgroups/fs2"
	"github.com/opencontainers/runc/libcontainer/specconv"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/supervisor/bundle"
	"github.com/minicri/minicri/supervisor/starter"
)

// update sets the named resources, and all processes' oom_score_adj unless it is nil, or restores all.
func update(r starter.Request, c container) error {
	wanted := new(specs.LinuxResources)
	if err := json.Unmarshal(r.Resources, wanted); err != nil {
		return fmt.Errorf("%w: %w", errdefs.ErrInvalidArgument, err)
	}
	paths := r.Cgroups
	const group = "memory.oom.group" // of each container of a kubelet; systemd before 253 resets what it does not know
	if now, _ := os.ReadFile(filepath.Join(paths[""], group)); string(now) == "1\n" {
		kept := map[string]string{group: "1"}
		maps.Copy(kept, wanted.Unified)
		wanted.Unified = kept
	}
	before := readLimits(paths, wanted.Unified)
	adjusted, err := setOOMScoreAdj(paths, r.OOMScoreAdj)
	if err == nil {
		err = tryLimits(paths, wanted)
	}
	if err == nil {
		err = c.setResources(wanted, r.OOMScoreAdj)
	}
	if err != nil {
		err = errors.Join(err, before.restore())
		for pid, value := range adjusted {
			err = errors.Join(err, writeOOMScoreAdj(pid, value))
		}
	}
	return err
}

func (c *libContainer) setResources(wanted *specs.LinuxResources, oomScoreAdj *int) error {
	lib, err := c.load()
	if err != nil {
		return err
	}
	config := lib.Config()
	resources, err := resourcesOf(wanted)
	if err != nil {
		return err
	}
	resources.Devices = config.Cgroups.Resources.Devices
	group := *config.Cgroups
	group.Resources, config.Cgroups = resources, &group
	if oomScoreAdj != nil {
		config.OomScoreAdj = oomScoreAdj // of later execs
	}
	err = lib.Set(config)
	resources.SkipDevices = false // libcontainer keeps config, and refuses to start execs with it
	return err
}

// resourcesOf translates the named resources for libcontainer. Others stay as they are.
func resourcesOf(wanted *specs.LinuxResources) (*cgroups.Resources, error) {
	config, err := specconv.CreateCgroupConfig(&specconv.CreateOpts{Spec: &specs.Spec{Linux: &specs.Linux{Resources: wanted}}}, nil)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errdefs.ErrInvalidArgument, err)
	}
	// Version 2 accepts a limit below the usage, and kills for it.
	config.Resources.SkipDevices, config.Resources.MemoryCheckBeforeUpdate = true, true
	return config.Resources, nil
}

// limits are the contents of the cgroup files that an update may write, by path.
type limits map[string]string

// limitFiles are the files' names, of both versions.
var limitFiles = [...]string{
	"cpu.shares", "cpu.cfs_period_us", "cpu.cfs_quota_us", "cpu.weight", "cpu.max",
	"cpuset.cpus", "cpuset.mems", "cpuset.*" + effective,
	"memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max", "memory.swap.max",
	"hugetlb.*.limit_in_bytes", "hugetlb.*.max",
}

// effective ends the names of files that hold what is in force of others, which may be empty.
const effective = ".effective"

// readLimits reads limitFiles, and the named files of version 2.
func readLimits(paths bundle.Cgroups, unified map[string]string) limits {
	var files []string
	for _, dir := range paths {
		for _, pattern := range limitFiles {
			found, _ := filepath.Glob(filepath.Join(dir, pattern))
			files = append(files, found...)
		}
	}
	for name := range unified {
		files = append(files, filepath.Join(paths[""], name))
	}
	read := make(limits)
	for _, path := range files {
		if content, err := os.ReadFile(path); err == nil {
			read[path] = strings.TrimSpace(string(content))
		}
	}
	return read
}

// tryLimits sets resources of version 2 before systemd gets them: systemd would keep what the kernel
// refuses, and write it again. It does nothing on version 1, nor for a container without its own cgroup,
// for which fs2 would use that of this process.
func tryLimits(paths bundle.Cgroups, wanted *specs.LinuxResources) error {
	if !cgroups.IsCgroup2UnifiedMode() || paths[""] == "" {
		return nil
	}
	r, err := resourcesOf(wanted)
	if err != nil {
		return err
	}
	m, err := fs2.NewManager(&cgroups.Cgroup{}, paths[""])
	if err != nil {
		return err
	}
	// The cpuset is last, as it cannot be undone: see restore.
	last := cgroups.Resources{SkipDevices: true, CpusetCpus: r.CpusetCpus, CpusetMems: r.CpusetMems}
	r.CpusetCpus, r.CpusetMems = "", ""
	if err := m.Set(r); err != nil {
		return err
	}
	return m.Set(&last)
}

// restore writes back what has changed. It repeats, as limits of memory and of memory and swap bound each other.
func (l limits) restore() (failed error) {
	for range 3 {
		failed = nil
		for path, content := range l {
			now, err := os.ReadFile(path)
			if err != nil || strings.TrimSpace(string(now)) == content || strings.HasSuffix(path, effective) {
				continue // the cgroup is gone, or the limit is unchanged
			}
			if content == "" { // a cpuset with processes cannot be made empty again
				content = l[path+effective]
			}
			if err := os.WriteFile(path, []byte(content+"\n"), 0); err != nil {
				failed = errors.Join(failed, fmt.Errorf("put %s back: %w", path, err))
			}
		}
	}
	return failed
}

// setOOMScoreAdj sets oom_score_adj of all processes of the container, and returns their old values.
func setOOMScoreAdj(paths bundle.Cgroups, adjust *int) (old map[int]string, err error) {
	old = make(map[int]string)
	for again := adjust != nil; again; {
		again = false
		pids, err := paths.Processes()
		if err != nil {
			return old, fmt.Errorf("set oom_score_adj: %w", err)
		}
		for _, pid := range pids {
			if _, seen := old[pid]; seen {
				continue
			}
			value, _ := os.ReadFile(oomScoreAdjFile(pid))
			old[pid] = strings.TrimSpace(string(value))
			again = again || old[pid] != strconv.Itoa(*adjust) // it may have started another meanwhile, with its value
			if err := writeOOMScoreAdj(pid, strconv.Itoa(*adjust)); err != nil {
				return old, fmt.Errorf("set oom_score_adj: %w", err)
			}
		}
	}
	return old, nil
}

func oomScoreAdjFile(pid int) string { return fmt.Sprintf("/proc/%d/oom_score_adj", pid) }

func writeOOMScoreAdj(pid int, value string) error {
	err := os.WriteFile(oomScoreAdjFile(pid), []byte(value), 0)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return nil // it has ended
	}
	return err
}
