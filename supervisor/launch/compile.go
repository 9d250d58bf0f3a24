//go:build cgo && seccomp

package launch

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/seccomp/libseccomp-golang"
	"golang.org/x/sys/unix"
)

// compile makes of a profile what libcontainer makes of it, byte for byte: a prologue by
// which calls that are newer than the profile fail with ENOSYS, and libseccomp's program.
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
	flags, err := flagsOfFilter(profile)
	if err != nil {
		return filter{}, err
	}
	native, err := seccomp.GetNativeArch()
	if err != nil {
		return filter{}, fmt.Errorf("seccomp: %w", err)
	}
	var archs []seccomp.ScmpArch // in this order libcontainer has them most of the time
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
	if !slices.Contains(archs, native) {
		archs = append(archs, native)
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

// addRules adds what the profile says of its calls.
func addRules(program *seccomp.ScmpFilter, profile *specs.LinuxSeccomp, otherwise seccomp.ScmpAction) error {
	names := 0
	for _, call := range profile.Syscalls {
		names += len(call.Names)
	}
	const many = 32 // from here on libcontainer asks for a binary tree; older libraries have none
	if names > many {
		_ = program.SetOptimize(2)
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

// addRule adds that of a call, none for one that this machine does not have. All that is
// said of its arguments has to be so; but of what is said of one argument more than once,
// each is enough.
func addRule(program *seccomp.ScmpFilter, name string, action seccomp.ScmpAction, args []specs.LinuxSeccompArg) error {
	number, err := seccomp.GetSyscallFromName(name)
	if err != nil {
		return nil
	}
	if len(args) == 0 {
		return program.AddRule(number, action)
	}
	var conditions []seccomp.ScmpCondition
	seen, again := map[uint]bool{}, false
	for _, arg := range args {
		condition, err := seccomp.MakeCondition(arg.Index, operators[arg.Op], arg.Value, arg.ValueTwo)
		if err != nil {
			return err
		}
		conditions = append(conditions, condition)
		again = again || seen[arg.Index]
		seen[arg.Index] = true
	}
	if !again {
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
	if !ok {
		return action, fmt.Errorf("seccomp: unknown action %q", name)
	}
	if name != specs.ActErrno && name != specs.ActTrace {
		return action, nil
	}
	if errno != nil {
		return action.SetReturnCode(int16(*errno)), nil
	}
	return action.SetReturnCode(int16(unix.EPERM)), nil
}

// flagsOfFilter are those of seccomp(2): where none are given, not even an empty list, the
// filter does not make speculation slower.
func flagsOfFilter(profile *specs.LinuxSeccomp) (flags uint64, err error) {
	const withSpecAllow = 4      // of libseccomp's API
	level, _ := seccomp.GetAPI() // 0 of old ones
	if profile.Flags == nil && level >= withSpecAllow {
		return unix.SECCOMP_FILTER_FLAG_SPEC_ALLOW, nil
	}
	for _, flag := range profile.Flags {
		switch flag {
		case specs.LinuxSeccompFlagLog:
			flags |= unix.SECCOMP_FILTER_FLAG_LOG
		case specs.LinuxSeccompFlagSpecAllow:
			flags |= unix.SECCOMP_FILTER_FLAG_SPEC_ALLOW
		case specs.LinuxSeccompFlagWaitKillableRecv:
			flags |= unix.SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV
		case "SECCOMP_FILTER_FLAG_TSYNC": // there is one thread
		default:
			return 0, fmt.Errorf("seccomp: unknown flag %q", flag)
		}
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
