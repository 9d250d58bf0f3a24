package validate

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/machine"
)

// mostOOMScoreAdj bounds an oom_score_adj on both sides (proc_pid_oom_score_adj(5)).
const mostOOMScoreAdj = 1000

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

func (p *problems) resources(field string, r *runtimeapi.LinuxContainerResources, m machine.Machine) {
	p.cpu(field, r)
	p.notBelow(field+"memory_limit_in_bytes", r.GetMemoryLimitInBytes(), -1)
	p.notBelow(field+"memory_swap_limit_in_bytes", r.GetMemorySwapLimitInBytes(), -1)
	if swap, memory := r.GetMemorySwapLimitInBytes(), r.GetMemoryLimitInBytes(); swap > 0 && swap < memory {
		p.bad(field+"memory_swap_limit_in_bytes", "%d is less than the memory limit %d, which it includes", swap, memory)
	}
	if adjust := r.GetOomScoreAdj(); adjust < -mostOOMScoreAdj || adjust > mostOOMScoreAdj {
		p.bad(field+"oom_score_adj", "%d is not between -%d and %d", adjust, mostOOMScoreAdj, mostOOMScoreAdj)
	}
	p.cpuset(field+"cpuset_cpus", r.GetCpusetCpus(), m.CPUs)
	p.cpuset(field+"cpuset_mems", r.GetCpusetMems(), m.MemoryNodes)
	for i, limit := range r.GetHugepageLimits() {
		p.hugepageSize(fmt.Sprintf("%shugepage_limits[%d].page_size", field, i), limit.GetPageSize(), m)
	}
	p.unified(field+"unified", r.GetUnified(), m)
}

var hugepageSize = regexp.MustCompile(`^[1-9][0-9]*[KMGT]B$`)

// hugepageSize: one that the kernel has, in its form, where they are known.
func (p *problems) hugepageSize(field, size string, m machine.Machine) {
	switch {
	case !hugepageSize.MatchString(size):
		p.bad(field, "%q is not a size like 2MB or 1GB", size)
	case len(m.HugepageSizes) > 0 && !slices.Contains(m.HugepageSizes, size):
		p.bad(field, "this machine has no huge pages of %s, it has %q", size, m.HugepageSizes)
	}
}

// What the kernel takes, times in microseconds: kernel/sched/core.c has
// MIN_SHARES, MAX_SHARES, min_cfs_quota_period, max_cfs_quota_period and
// max_cfs_runtime.
const (
	leastShares, mostShares = 2, 1 << 18
	leastTime, longestTime  = 1_000, 1_000_000
	mostQuota               = 1<<44 - 1
)

// cpu: zero asks for nothing, and a quota of -1 is none.
func (p *problems) cpu(field string, r *runtimeapi.LinuxContainerResources) {
	if period := r.GetCpuPeriod(); period != 0 && (period < leastTime || period > longestTime) {
		p.bad(field+"cpu_period", "%d is not between %d and %d", period, leastTime, longestTime)
	}
	if quota := r.GetCpuQuota(); quota != 0 && quota != -1 && (quota < leastTime || quota > mostQuota) {
		p.bad(field+"cpu_quota", "%d is neither -1 nor between %d and %d", quota, leastTime, mostQuota)
	}
	if shares := r.GetCpuShares(); shares != 0 && (shares < leastShares || shares > mostShares) {
		p.bad(field+"cpu_shares", "%d is not between %d and %d", shares, leastShares, mostShares)
	}
}

func (p *problems) notBelow(field string, value, least int64) {
	if value < least {
		p.bad(field, "%d is less than %d", value, least)
	}
}

// cpuset: numbers and ranges with commas (cpuset(7), list format), below the
// number that the kernel knows, where that is known.
func (p *problems) cpuset(field, set string, count uint64) {
	if set == "" {
		return
	}
	for part := range strings.SplitSeq(set, ",") {
		first, last, isRange := strings.Cut(part, "-")
		from, err := strconv.ParseUint(first, 10, 31)
		to := from
		if isRange {
			var errLast error
			to, errLast = strconv.ParseUint(last, 10, 31)
			err = errors.Join(err, errLast)
		}
		if err != nil || to < from {
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
