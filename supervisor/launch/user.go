package launch

import (
	"encoding/binary"
	"slices"
	"strings"

	"github.com/moby/sys/capability"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// becomeUser makes the process the user's, with the capabilities that it is to have;
// nil: all of them.
func (a *attempt) becomeUser(u specs.User, caps *specs.LinuxCapabilities) error {
	last, err := capability.LastCap()
	if err != nil {
		return err
	}
	if caps != nil {
		bounding := capSet(caps.Bounding, last)
		for c := range last + 1 {
			if bounding&(1<<c) == 0 {
				a.add("drop "+c.String()+" for good", unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, uint64(c))
			}
		}
	}
	a.add("keep capabilities", unix.SYS_PRCTL, unix.PR_SET_KEEPCAPS, 1)
	a.setUser(u)
	a.add("keep capabilities no longer", unix.SYS_PRCTL, unix.PR_SET_KEEPCAPS, 0)
	if caps != nil {
		a.setCapabilities(caps, last)
	}
	return nil
}

func (a *attempt) setUser(u specs.User) {
	var groups []byte
	for _, group := range u.AdditionalGids {
		groups = binary.NativeEndian.AppendUint32(groups, group)
	}
	a.add("set the groups", unix.SYS_SETGROUPS, uint64(len(u.AdditionalGids)), a.bytes(groups))
	a.add("set the group", unix.SYS_SETGID, uint64(u.GID))
	a.add("set the user", unix.SYS_SETUID, uint64(u.UID))
}

func (a *attempt) setCapabilities(caps *specs.LinuxCapabilities, last capability.Cap) {
	effective, permitted, inheritable := capSet(caps.Effective, last), capSet(caps.Permitted, last), capSet(caps.Inheritable, last)
	var data []byte // struct __user_cap_data_struct, low halves first (capset(2))
	for _, shift := range []int{0, 32} {
		for _, set := range []uint64{effective, permitted, inheritable} {
			data = binary.NativeEndian.AppendUint32(data, uint32(set>>shift))
		}
	}
	itself := a.numbers(unix.LINUX_CAPABILITY_VERSION_3)
	a.add("set the capabilities", unix.SYS_CAPSET, itself, a.bytes(data))
	a.add("drop the ambient capabilities", unix.SYS_PRCTL, unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL)
	ambient := capSet(caps.Ambient, last)
	for c := range last + 1 {
		if ambient&(1<<c) != 0 {
			a.try("raise "+c.String(), unix.SYS_PRCTL, unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_RAISE, uint64(c))
		}
	}
}

// capSet is a set of capabilities by their names; those that this kernel does not
// have are left out.
func capSet(names []string, last capability.Cap) (set uint64) {
	for c := range last + 1 {
		if slices.Contains(names, "CAP_"+strings.ToUpper(c.String())) {
			set |= 1 << c
		}
	}
	return set
}

// loadFilter loads a seccomp filter, if there is one.
func (a *attempt) loadFilter(f filter) {
	if f.program == nil {
		return
	}
	program := a.numbers(uint64(len(f.program)/filterInstruction), a.bytes(f.program))
	a.add("load the seccomp filter", unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, f.flags, program)
}
