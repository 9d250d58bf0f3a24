package machine

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// resources are those of setrlimit(2), by the names of runtime-spec.
func resources() map[string]int {
	return map[string]int{
		"RLIMIT_AS": unix.RLIMIT_AS, "RLIMIT_CORE": unix.RLIMIT_CORE, "RLIMIT_CPU": unix.RLIMIT_CPU, "RLIMIT_DATA": unix.RLIMIT_DATA,
		"RLIMIT_FSIZE": unix.RLIMIT_FSIZE, "RLIMIT_LOCKS": unix.RLIMIT_LOCKS, "RLIMIT_MEMLOCK": unix.RLIMIT_MEMLOCK,
		"RLIMIT_MSGQUEUE": unix.RLIMIT_MSGQUEUE, "RLIMIT_NICE": unix.RLIMIT_NICE, "RLIMIT_NOFILE": unix.RLIMIT_NOFILE,
		"RLIMIT_NPROC": unix.RLIMIT_NPROC, "RLIMIT_RSS": unix.RLIMIT_RSS, "RLIMIT_RTPRIO": unix.RLIMIT_RTPRIO,
		"RLIMIT_RTTIME": unix.RLIMIT_RTTIME, "RLIMIT_SIGPENDING": unix.RLIMIT_SIGPENDING, "RLIMIT_STACK": unix.RLIMIT_STACK,
	}
}

// hardLimits are those of this process.
func hardLimits() (map[string]uint64, error) {
	limits := make(map[string]uint64)
	for name, resource := range resources() {
		var limit unix.Rlimit
		if err := unix.Getrlimit(resource, &limit); err != nil {
			return nil, fmt.Errorf("read our own %s: %w", name, err)
		}
		limits[name] = limit.Max
	}
	return limits, nil
}

// RlimitNear is the hard limit nearest to the wanted one that a process of this
// machine may have.
func (m Machine) RlimitNear(name string, wanted uint64) uint64 {
	if own, limited := m.Rlimits[name]; limited {
		return min(wanted, own)
	}
	return wanted
}
