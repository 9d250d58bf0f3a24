package oci

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// mostOOMScoreAdj bounds an oom_score_adj on both sides (proc_pid_oom_score_adj(5)).
const mostOOMScoreAdj = 1000

func (c *containerCheck) resources() {
	const field = "config.linux.resources."
	r := c.config.GetLinux().GetResources()
	c.notBelow(field+"cpu_period", r.GetCpuPeriod(), 0)
	c.notBelow(field+"cpu_quota", r.GetCpuQuota(), -1)
	c.notBelow(field+"cpu_shares", r.GetCpuShares(), 0)
	c.notBelow(field+"memory_limit_in_bytes", r.GetMemoryLimitInBytes(), -1)
	c.notBelow(field+"memory_swap_limit_in_bytes", r.GetMemorySwapLimitInBytes(), -1)
	if swap, memory := r.GetMemorySwapLimitInBytes(), r.GetMemoryLimitInBytes(); swap > 0 && swap < memory {
		c.bad(field+"memory_swap_limit_in_bytes", "%d is less than the memory limit %d, which it includes", swap, memory)
	}
	if adjust := r.GetOomScoreAdj(); adjust < -mostOOMScoreAdj || adjust > mostOOMScoreAdj {
		c.bad(field+"oom_score_adj", "%d is not between -%d and %d", adjust, mostOOMScoreAdj, mostOOMScoreAdj)
	}
	c.cpuset(field+"cpuset_cpus", r.GetCpusetCpus())
	c.cpuset(field+"cpuset_mems", r.GetCpusetMems())
	for i, limit := range r.GetHugepageLimits() {
		if !hugepageSize.MatchString(limit.GetPageSize()) {
			c.bad(fmt.Sprintf("%shugepage_limits[%d].page_size", field, i), "%q is not a size like 2MB or 1GB", limit.GetPageSize())
		}
	}
	c.unified(field+"unified", r.GetUnified())
}

var hugepageSize = regexp.MustCompile(`^[1-9][0-9]*[KMGT]B$`)

func (c *containerCheck) notBelow(field string, value, least int64) {
	if value < least {
		c.bad(field, "%d is less than %d", value, least)
	}
}

// cpuset: numbers and ranges with commas (cpuset(7), list format).
func (c *containerCheck) cpuset(field, set string) {
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
			c.bad(field, "%q is not a list of numbers and ranges", set)
			return
		}
	}
}

// unified: each key is a file in the cgroup, named controller.what.
func (c *containerCheck) unified(field string, keys map[string]string) {
	if len(keys) > 0 && !c.machine.CgroupV2 {
		c.bad(field, "needs cgroup v2, this machine has v1")
		return
	}
	for key, value := range keys {
		controller, what, _ := strings.Cut(key, ".")
		if controller == "" || what == "" || strings.ContainsAny(key, "/\x00") || strings.ContainsRune(value, 0) {
			c.bad(fmt.Sprintf("%s[%s]", field, key), "is not a file of a cgroup")
		}
	}
}
