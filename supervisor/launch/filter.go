package launch

import (
	"encoding/json"
	"sync"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// filterInstruction is the size of an instruction of a filter (struct sock_filter
// of linux/filter.h).
const filterInstruction = 8

// filter is what seccomp(2) loads; the program is nil for none.
type filter struct {
	program []byte
	flags   uint64
}

// filters are what seccomp profiles were compiled to: nearly all containers of a node
// have one of a few.
type filters struct {
	mu       sync.Mutex
	compiled map[string]filter // by profile
}

// mostFilters is how many are kept.
const mostFilters = 16

// of returns the filter of a profile.
func (f *filters) of(profile *specs.LinuxSeccomp) (filter, error) {
	if profile == nil || profile.DefaultAction == "" && len(profile.Syscalls) == 0 {
		return filter{}, nil
	}
	key, err := json.Marshal(profile)
	if err != nil {
		return filter{}, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if made, ok := f.compiled[string(key)]; ok {
		return made, nil
	}
	made, err := compile(profile)
	if err != nil {
		return filter{}, err
	}
	if f.compiled == nil || len(f.compiled) == mostFilters {
		f.compiled = make(map[string]filter)
	}
	f.compiled[string(key)] = made
	return made, nil
}
