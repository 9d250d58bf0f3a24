package runtime

import (
	"encoding/json"
	"slices"
	"sync"

	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// filterInstruction is the size of an instruction of a filter (struct sock_filter
// of linux/filter.h).
const filterInstruction = 8

// filters are the programs that seccomp profiles were compiled to: nearly all
// pauses have one and the same.
type filters struct {
	mu       sync.Mutex
	compiled map[string][]byte // by profile
}

// mostFilters is how many are kept.
const mostFilters = 8

// of returns the program for a profile, nil for none.
func (f *filters) of(profile *configs.Seccomp) ([]byte, error) {
	if profile == nil {
		return nil, nil
	}
	key, err := json.Marshal(profile)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if program, ok := f.compiled[string(key)]; ok {
		return program, nil
	}
	program, err := compileFilter(profile)
	if err != nil {
		return nil, err
	}
	if f.compiled == nil || len(f.compiled) == mostFilters {
		f.compiled = make(map[string][]byte)
	}
	f.compiled[string(key)] = program
	return program, nil
}

// initForSeccomp: a list of what is allowed and an error for the rest, as pause's
// default profile is one. libcontainer's other filters are not compiled here.
func initForSeccomp(profile *configs.Seccomp) string {
	if profile == nil {
		return ""
	}
	const why = "a seccomp profile that is more than a list of calls"
	if profile.DefaultAction != configs.Errno || len(profile.Architectures) > 0 || profile.ListenerPath != "" {
		return why
	}
	for _, flag := range profile.Flags {
		if flag != specs.LinuxSeccompFlagSpecAllow {
			return why
		}
	}
	for _, call := range profile.Syscalls {
		if call.Action != configs.Allow || len(call.Args) > 0 {
			return why
		}
	}
	return ""
}

// seccompFlags are those of seccomp(2) for a profile.
func seccompFlags(profile *configs.Seccomp) uint64 {
	if slices.Contains(profile.Flags, specs.LinuxSeccompFlagSpecAllow) {
		return unix.SECCOMP_FILTER_FLAG_SPEC_ALLOW
	}
	return 0
}
