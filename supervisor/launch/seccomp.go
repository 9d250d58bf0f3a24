//go:build cgo && seccomp

package launch

import (
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/seccomp/libseccomp-golang"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// compile compiles a profile as libcontainer does: a prologue has calls that are newer than the profile fail
// with ENOSYS, and libseccomp's program follows.
func compile(profile *specs.LinuxSeccomp) (filter, error) {
	action, err := actionOf(profile.DefaultAction, profile.DefaultErrnoRet)
	if err != nil {
		return filter{}, err
	}
	program, err := seccomp.NewFilter(action)
	if err != nil {
		return filter{}, fmt.Errorf("seccomp: %w", err)
	}
	defer program.Release()
	flags, err := flagsOf(profile)
	if err != nil {
		return filter{}, err
	}
	native, err := seccomp.GetNativeArch()
	if err != nil {
		return filter{}, fmt.Errorf("seccomp: %w", err)
	}
	archs := []seccomp.ScmpArch{native}
	for _, name := range profile.Architectures {
		arch, err := seccomp.GetArchFromString(strings.TrimPrefix(string(name), "SCMP_ARCH_"))
		if err == nil {
			err = program.AddArch(arch)
		}
		if err != nil {
			return filter{}, fmt.Errorf("seccomp: architecture %s: %w", name, err)
		}
		if !slices.Contains(archs, arch) {
			archs = append(archs, arch)
		}
	}
	if err := addRules(program, profile, action); err != nil {
		return filter{}, err
	}
	before, err := prologue(profile, archs)
	if err != nil {
		return filter{}, err
	}
	compiled, err := export(program)
	return filter{program: append(before, compiled...), flags: flags}, err
}

// addRules adds the rules of a profile's calls.
func addRules(program *seccomp.ScmpFilter, profile *specs.LinuxSeccomp, otherwise seccomp.ScmpAction) error {
	names := 0
	for _, call := range profile.Syscalls {
		names += len(call.Names)
	}
	if names > 32 {
		_ = program.SetOptimize(2) // a binary tree, as in libcontainer; old libraries have none
	}
	for _, call := range profile.Syscalls {
		action, err := actionOf(call.Action, call.ErrnoRet)
		if err != nil {
			return err
		}
		if action == otherwise {
			continue
		}
		for _, name := range call.Names {
			if err := addRule(program, name, action, call.Args); err != nil {
				return fmt.Errorf("seccomp: %s: %w", name, err)
			}
		}
	}
	return nil
}

// addRule adds the rule of a call, unless this machine does not have the call. All conditions have to hold,
// but of several on one argument each is enough.
func addRule(program *seccomp.ScmpFilter, name string, action seccomp.ScmpAction, args []specs.LinuxSeccompArg) error {
	number, err := seccomp.GetSyscallFromName(name)
	if err != nil {
		return nil
	}
	if len(args) == 0 {
		return program.AddRule(number, action)
	}
	var conditions []seccomp.ScmpCondition
	seen := make(map[uint]bool)
	for _, arg := range args {
		condition, err := seccomp.MakeCondition(arg.Index, operators[arg.Op], arg.Value, arg.ValueTwo)
		if err != nil {
			return err
		}
		conditions = append(conditions, condition)
		seen[arg.Index] = true
	}
	if len(seen) == len(args) {
		return program.AddRuleConditional(number, action, conditions)
	}
	for _, condition := range conditions {
		if err := program.AddRuleConditional(number, action, []seccomp.ScmpCondition{condition}); err != nil {
			return err
		}
	}
	return nil
}

var operators = map[specs.LinuxSeccompOperator]seccomp.ScmpCompareOp{
	specs.OpNotEqual: seccomp.CompareNotEqual, specs.OpLessThan: seccomp.CompareLess, specs.OpLessEqual: seccomp.CompareLessOrEqual,
	specs.OpEqualTo: seccomp.CompareEqual, specs.OpGreaterEqual: seccomp.CompareGreaterEqual, specs.OpGreaterThan: seccomp.CompareGreater,
	specs.OpMaskedEqual: seccomp.CompareMaskedEqual,
}

var actions = map[specs.LinuxSeccompAction]seccomp.ScmpAction{
	specs.ActKill: seccomp.ActKillThread, specs.ActKillThread: seccomp.ActKillThread, specs.ActKillProcess: seccomp.ActKillProcess,
	specs.ActTrap: seccomp.ActTrap, specs.ActErrno: seccomp.ActErrno, specs.ActTrace: seccomp.ActTrace, specs.ActAllow: seccomp.ActAllow,
	specs.ActLog: seccomp.ActLog,
}

func actionOf(name specs.LinuxSeccompAction, errno *uint) (seccomp.ScmpAction, error) {
	action, ok := actions[name]
	switch {
	case !ok:
		return action, fmt.Errorf("seccomp: unknown action %q", name)
	case name != specs.ActErrno && name != specs.ActTrace:
		return action, nil
	case errno != nil:
		return action.SetReturnCode(int16(*errno)), nil
	}
	return action.SetReturnCode(int16(unix.EPERM)), nil
}

var filterFlags = map[specs.LinuxSeccompFlag]uint64{
	specs.LinuxSeccompFlagLog: unix.SECCOMP_FILTER_FLAG_LOG, specs.LinuxSeccompFlagSpecAllow: unix.SECCOMP_FILTER_FLAG_SPEC_ALLOW,
	specs.LinuxSeccompFlagWaitKillableRecv: unix.SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV, "SECCOMP_FILTER_FLAG_TSYNC": 0, // there is one thread
}

// flagsOf returns the flags of seccomp(2). As in libcontainer, a profile without flags keeps speculation fast.
func flagsOf(profile *specs.LinuxSeccomp) (flags uint64, err error) {
	level, _ := seccomp.GetAPI() // 0 if libseccomp is old, 4 if it has SPEC_ALLOW
	if profile.Flags == nil && level >= 4 {
		return unix.SECCOMP_FILTER_FLAG_SPEC_ALLOW, nil
	}
	for _, name := range profile.Flags {
		flag, ok := filterFlags[name]
		if !ok {
			return 0, fmt.Errorf("seccomp: unknown flag %q", name)
		}
		flags |= flag
	}
	return flags, nil
}

func export(filter *seccomp.ScmpFilter) ([]byte, error) {
	fd, err := unix.MemfdCreate("filter", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	file := os.NewFile(uintptr(fd), "filter")
	defer file.Close()
	if err := filter.ExportBPF(file); err != nil {
		return nil, fmt.Errorf("seccomp: export the filter: %w", err)
	}
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	return io.ReadAll(file)
}

// auditArchs are the architectures as a filter sees them: x32 as x86_64, with a bit set in the call's number.
var auditArchs = map[seccomp.ScmpArch]uint32{
	seccomp.ArchX86: unix.AUDIT_ARCH_I386, seccomp.ArchAMD64: unix.AUDIT_ARCH_X86_64, seccomp.ArchX32: unix.AUDIT_ARCH_X86_64,
	seccomp.ArchARM: unix.AUDIT_ARCH_ARM, seccomp.ArchARM64: unix.AUDIT_ARCH_AARCH64,
	seccomp.ArchMIPSEL: unix.AUDIT_ARCH_MIPSEL, seccomp.ArchMIPSEL64: unix.AUDIT_ARCH_MIPSEL64, seccomp.ArchMIPSEL64N32: unix.AUDIT_ARCH_MIPSEL64N32,
	seccomp.ArchPPC64LE: unix.AUDIT_ARCH_PPC64LE, seccomp.ArchRISCV64: unix.AUDIT_ARCH_RISCV64, seccomp.ArchLOONGARCH64: unix.AUDIT_ARCH_LOONGARCH64,
}

// prologue has calls with larger numbers than any in the profile fail with ENOSYS instead of the profile's
// error, so that programs fall back to older calls. A profile that allows or traces such calls needs none.
func prologue(profile *specs.LinuxSeccomp, archs []seccomp.ScmpArch) ([]byte, error) {
	switch profile.DefaultAction {
	case specs.ActAllow, specs.ActLog, specs.ActTrace:
		return nil, nil
	}
	const numberOffset, archOffset, wordSize = 0, 4, 4 // of struct seccomp_data
	const x32Bit = 1 << 30
	var code []bpf.Instruction
	for _, arch := range archs {
		seen, ok := auditArchs[arch]
		if !ok {
			return nil, fmt.Errorf("seccomp: no number of architecture %v", arch)
		}
		last, limit := lastCall(profile, arch), uint32(math.MaxUint32)
		if last == 0 {
			continue
		}
		if arch == seccomp.ArchAMD64 {
			limit = x32Bit - 1 // the others are x32's
		}
		code = append(code,
			bpf.LoadAbsolute{Off: archOffset, Size: wordSize}, bpf.JumpIf{Cond: bpf.JumpEqual, Val: seen, SkipFalse: 4},
			bpf.LoadAbsolute{Off: numberOffset, Size: wordSize}, bpf.JumpIf{Cond: bpf.JumpGreaterThan, Val: last, SkipFalse: 2},
			bpf.JumpIf{Cond: bpf.JumpGreaterThan, Val: limit, SkipTrue: 1}, bpf.RetConstant{Val: unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)},
		)
	}
	raw, err := bpf.Assemble(code)
	if err != nil {
		return nil, fmt.Errorf("seccomp: %w", err)
	}
	return binary.Append(nil, binary.NativeEndian, raw)
}

func lastCall(profile *specs.LinuxSeccomp, arch seccomp.ScmpArch) (last uint32) {
	for _, call := range profile.Syscalls {
		for _, name := range call.Names {
			number, err := seccomp.GetSyscallFromNameByArch(name, arch)
			if err == nil && number > 0 {
				last = max(last, uint32(number))
			}
		}
	}
	return last
}
