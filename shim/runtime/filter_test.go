package runtime

import (
	"encoding/binary"
	gort "runtime"
	"slices"
	"testing"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// auditArch is what a filter sees of this machine's own calls.
var auditArch = map[string]uint32{"amd64": unix.AUDIT_ARCH_X86_64, "arm64": unix.AUDIT_ARCH_AARCH64}[gort.GOARCH]

// The filter allows what is in the list, and refuses all else with its error, as
// libseccomp's numbers of this machine are.
func TestFilterAllowsItsListOnly(t *testing.T) {
	spec := newNode(t).spec("filtered")
	spec.Linux.Seccomp = profile("write", "execve", "rt_sigtimedwait", "no_such_call")
	config, err := toConfig(spec, "filtered", false, true)
	if err != nil {
		t.Fatal(err)
	}
	program, err := new(filters).of(config.Seccomp)
	if err != nil {
		t.Fatal(err)
	}
	vm := vmOf(t, program)
	allowed := []int{unix.SYS_WRITE, unix.SYS_EXECVE, unix.SYS_RT_SIGTIMEDWAIT}
	const allow, refuse, data, mask = 0x7fff0000, 0x50000 | int(unix.EPERM), 64, 0x7fffffff
	for call := range 1000 {
		seen := make([]byte, data)
		binary.BigEndian.PutUint32(seen, uint32(call)) // the VM's order
		binary.BigEndian.PutUint32(seen[4:], auditArch)
		got, err := vm.Run(seen)
		want := refuse
		if slices.Contains(allowed, call) {
			want = allow
		}
		if err != nil || got&mask != want {
			t.Errorf("call %d: %#x, %v, want %#x", call, got, err, want)
		}
		binary.BigEndian.PutUint32(seen[4:], auditArch^1)
		if got, err := vm.Run(seen); err != nil || got == allow {
			t.Errorf("call %d of another architecture: %#x, %v", call, got, err)
		}
	}
}

func vmOf(t *testing.T, program []byte) *bpf.VM {
	t.Helper()
	var raw []bpf.RawInstruction
	for ; len(program) >= filterInstruction; program = program[filterInstruction:] {
		raw = append(raw, bpf.RawInstruction{Op: binary.NativeEndian.Uint16(program), Jt: program[2], Jf: program[3], K: binary.NativeEndian.Uint32(program[4:])})
	}
	instructions, known := bpf.Disassemble(raw)
	if !known || len(program) > 0 {
		t.Fatalf("no filter: %v", raw)
	}
	vm, err := bpf.NewVM(instructions)
	if err != nil {
		t.Fatal(err)
	}
	return vm
}
