//go:build cgo && seccomp

package launch

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/seccomp/libseccomp-golang"
	"golang.org/x/sys/unix"
)

// auditArchs are what a filter sees of calls of an architecture. x32 is seen as x86_64,
// with a bit set in the number of the call.
var auditArchs = map[seccomp.ScmpArch]uint32{
	seccomp.ArchX86: unix.AUDIT_ARCH_I386, seccomp.ArchAMD64: unix.AUDIT_ARCH_X86_64, seccomp.ArchX32: unix.AUDIT_ARCH_X86_64,
	seccomp.ArchARM: unix.AUDIT_ARCH_ARM, seccomp.ArchARM64: unix.AUDIT_ARCH_AARCH64,
	seccomp.ArchMIPSEL: unix.AUDIT_ARCH_MIPSEL, seccomp.ArchMIPSEL64: unix.AUDIT_ARCH_MIPSEL64, seccomp.ArchMIPSEL64N32: unix.AUDIT_ARCH_MIPSEL64N32,
	seccomp.ArchPPC64LE: unix.AUDIT_ARCH_PPC64LE, seccomp.ArchRISCV64: unix.AUDIT_ARCH_RISCV64, seccomp.ArchLOONGARCH64: unix.AUDIT_ARCH_LOONGARCH64,
}

const (
	x32Bit    = 1 << 30
	retENOSYS = unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)
)

// prologue has calls fail with ENOSYS whose numbers are larger than any in the profile, so
// that programs fall back to older ones, instead of with the error of what is refused. A
// profile that allows the others, or leaves them to a tracer, needs none.
func prologue(profile *specs.LinuxSeccomp, archs []seccomp.ScmpArch) ([]byte, error) {
	switch profile.DefaultAction {
	case specs.ActAllow, specs.ActLog, specs.ActTrace:
		return nil, nil
	}
	last := make(map[uint32]map[seccomp.ScmpArch]uint32) // calls, by what is seen of their architecture
	var order []uint32                                   // of what is seen
	for _, arch := range archs {
		seen, ok := auditArchs[arch]
		if !ok {
			return nil, fmt.Errorf("seccomp: no number of architecture %v", arch)
		}
		if last[seen] == nil {
			last[seen] = make(map[seccomp.ScmpArch]uint32)
			order = append(order, seen)
		}
		if number := lastCall(profile, arch); number > 0 {
			last[seen][arch] = number
		}
	}
	return assemble(last, order)
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

// assemble writes the prologue from its end, from which its jumps are counted: a section
// for each architecture, and before them the jumps to the sections.
func assemble(last map[uint32]map[seccomp.ScmpArch]uint32, order []uint32) ([]byte, error) {
	code := []unix.SockFilter{jump(1), ret(retENOSYS)}
	at := make(map[uint32]int) // of sections, from the end
	for _, arch := range order {
		if len(last[arch]) == 0 {
			continue
		}
		toENOSYS := len(code) - 1
		section, err := sectionOf(arch, last[arch], toENOSYS)
		if err != nil {
			return nil, err
		}
		code = append(section, code...)
		at[arch] = len(code)
	}
	code = append([]unix.SockFilter{jump(len(code))}, code...)
	for _, arch := range order {
		const farthest = 255
		skip := len(code) - at[arch]
		if skip <= farthest {
			code = append([]unix.SockFilter{branch(unix.BPF_JEQ, arch, skip, 0)}, code...)
		} else {
			code = append([]unix.SockFilter{branch(unix.BPF_JEQ, arch, 0, 1), jump(skip)}, code...)
		}
	}
	const archOffset = 4 // of struct seccomp_data
	code = append([]unix.SockFilter{load(archOffset)}, code...)
	var b []byte
	for _, i := range code {
		b = binary.NativeEndian.AppendUint16(b, i.Code)
		b = append(b, i.Jt, i.Jf)
		b = binary.NativeEndian.AppendUint32(b, i.K)
	}
	return b, nil
}

// sectionOf compares the number of a call with the last one: the larger ones jump to
// ENOSYS, so many instructions behind the section, the others over it.
func sectionOf(arch uint32, last map[seccomp.ScmpArch]uint32, toENOSYS int) ([]unix.SockFilter, error) {
	const farthest = 250
	if toENOSYS > farthest {
		return nil, errors.New("seccomp: too many architectures")
	}
	pass := jump(toENOSYS + 1)
	larger := func(number uint32, behind, otherwise int) unix.SockFilter {
		return branch(unix.BPF_JGT, number, toENOSYS+behind, otherwise)
	}
	code := []unix.SockFilter{load(0)}
	x64, hasX64 := last[seccomp.ArchAMD64]
	x32, hasX32 := last[seccomp.ArchX32]
	switch {
	case hasX64 && hasX32:
		return append(code, branch(unix.BPF_JSET, x32Bit, 1, 0), larger(x64, 2, 1), larger(x32, 1, 0), pass), nil
	case hasX64: // the others pass by both
		return append(code, branch(unix.BPF_JSET, x32Bit, 1, 0), larger(x64, 1, 0), pass), nil
	case hasX32:
		return append(code, branch(unix.BPF_JSET, x32Bit, 0, 1), larger(x32, 1, 0), pass), nil
	}
	for _, number := range last {
		code = append(code, larger(number, 1, 0), pass)
	}
	return code, nil
}

func load(offset uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
}

func jump(skip int) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JA, K: uint32(skip)}
}

func ret(value uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: value}
}

func branch(how uint16, with uint32, then, otherwise int) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_K | how, Jt: uint8(then), Jf: uint8(otherwise), K: with}
}
