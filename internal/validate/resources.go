package validate

import (
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/machine"
)

// Resources reports what is wrong with the resources of a request that changes
// those of a container; field is where they are in it, with a dot at the end.
func Resources(field string, r *runtimeapi.LinuxContainerResources, m machine.Machine) error {
	p := &problems{}
	p.resources(field, r, m)
	return p.err()
}

// InForce is Resources for all that are in force together, where one may need
// another.
func InForce(field string, r *runtimeapi.LinuxContainerResources, m machine.Machine) error {
	p := &problems{}
	p.inForce(field, r, m)
	return p.err()
}

// inForce: the limit of memory and swap together includes that of memory, and
// without one there is nothing to include.
func (p *problems) inForce(field string, r *runtimeapi.LinuxContainerResources, m machine.Machine) {
	p.resources(field, r, m)
	if swap, memory := r.GetMemorySwapLimitInBytes(), r.GetMemoryLimitInBytes(); swap > 0 && (memory == 0 || memory == -1) {
		p.bad(field+"memory_swap_limit_in_bytes", "%d includes a memory limit, but there is none: set memory_limit_in_bytes, or -1 here", swap)
	}
}

// resources: zero asks for nothing, and -1 is no limit. The bounds of the CPU are the
// kernel's, times in microseconds: kernel/sched/core.c has MIN_SHARES, MAX_SHARES,
// min_cfs_quota_period, max_cfs_quota_period and max_cfs_runtime.
func (p *problems) resources(field string, r *runtimeapi.LinuxContainerResources, m machine.Machine) {
	swap, memory := r.GetMemorySwapLimitInBytes(), r.GetMemoryLimitInBytes()
	for _, number := range []struct {
		name               string
		value, least, most int64
		hasNone            bool
	}{
		{"cpu_period", r.GetCpuPeriod(), 1_000, 1_000_000, false},
		{"cpu_quota", r.GetCpuQuota(), 1_000, 1<<44 - 1, true},
		{"cpu_shares", r.GetCpuShares(), 2, 1 << 18, false},
		{"memory_limit_in_bytes", memory, 1, math.MaxInt64, true},
		{"memory_swap_limit_in_bytes", swap, 1, math.MaxInt64, true},
		{"oom_score_adj", r.GetOomScoreAdj(), -1000, 1000, false}, // proc_pid_oom_score_adj(5)
	} {
		if number.value == 0 || number.value == -1 && number.hasNone {
			continue
		}
		if number.value < number.least || number.value > number.most {
			p.bad(field+number.name, "%d is not between %d and %d", number.value, number.least, number.most)
		}
	}
	if swap > 0 && swap < memory {
		p.bad(field+"memory_swap_limit_in_bytes", "%d is less than the memory limit %d, which it includes", swap, memory)
	}
	p.cpuset(field+"cpuset_cpus", r.GetCpusetCpus(), m.CPUs)
	p.cpuset(field+"cpuset_mems", r.GetCpusetMems(), m.MemoryNodes)
	for i, limit := range r.GetHugepageLimits() {
		switch at, size := fmt.Sprintf("%shugepage_limits[%d].page_size", field, i), limit.GetPageSize(); {
		case !hugepageSize.MatchString(size):
			p.bad(at, "%q is not a size like 2MB or 1GB", size)
		case len(m.HugepageSizes) > 0 && !slices.Contains(m.HugepageSizes, size):
			p.bad(at, "this machine has no huge pages of %s, it has %q", size, m.HugepageSizes)
		}
	}
	p.unified(field+"unified", r.GetUnified(), m)
}

var hugepageSize = regexp.MustCompile(`^[1-9][0-9]*[KMGT]B$`)

// cpuset: numbers and ranges with commas (cpuset(7), list format), below the
// number that the kernel knows, where that is known.
func (p *problems) cpuset(field, set string, count uint64) {
	if set == "" {
		return
	}
	for part := range strings.SplitSeq(set, ",") {
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		from, err := strconv.ParseUint(first, 10, 31)
		to, errLast := strconv.ParseUint(last, 10, 31)
		if errors.Join(err, errLast) != nil || to < from {
			p.bad(field, "%q is not a list of numbers and ranges", set)
			return
		}
		if count > 0 && to >= count {
			p.bad(field, "%d is not on this machine, whose last one is %d", to, count-1)
			return
		}
	}
}

// unified: each key is a file in the cgroup, named controller.what, or of all
// cgroups, named cgroup.what.
func (p *problems) unified(field string, keys map[string]string, m machine.Machine) {
	if len(keys) > 0 && !m.CgroupV2 {
		p.bad(field, "needs cgroup v2, this machine has v1")
		return
	}
	for key, value := range keys {
		controller, what, _ := strings.Cut(key, ".")
		switch {
		case controller == "" || what == "" || strings.ContainsAny(key, "/\x00") || strings.ContainsRune(value, 0):
			p.bad(fmt.Sprintf("%s[%s]", field, key), "is not a file of a cgroup")
		case controller != "cgroup" && len(m.Controllers) > 0 && !slices.Contains(m.Controllers, controller):
			p.bad(fmt.Sprintf("%s[%s]", field, key), "there is no controller %q, this machine has %q", controller, m.Controllers)
		}
	}
}
