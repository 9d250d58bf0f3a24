package launch_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
)

// seenOf is what the kernel says of a process of a container, with what differs from process to process taken out.
func seenOf(t *testing.T, pid int, id string) map[string]string {
	proc := "/proc/" + strconv.Itoa(pid)
	seen := map[string]string{}
	for _, name := range []string{"attr/current", "attr/exec", "attr/fscreate", "attr/keycreate", "cgroup", "limits", "oom_score_adj", "cmdline", "environ", "comm", "sessionid", "loginuid", "timerslack_ns", "personality", "coredump_filter", "uid_map"} {
		seen[name] = read(proc + "/" + name)
	}
	for _, name := range []string{"exe", "cwd", "root"} {
		target, err := os.Readlink(proc + "/" + name)
		seen[name] = fmt.Sprint(target, err)
	}
	descriptors, _ := filepath.Glob(proc + "/fd/*")
	seen["descriptors"] = strings.ReplaceAll(fmt.Sprint(descriptors), proc, "")
	ours, _ := filepath.Glob(fmt.Sprintf("/proc/%d/ns/*", os.Getpid()))
	for _, path := range ours {
		ours, _ := os.Readlink(path)
		its, _ := os.Readlink(proc + "/ns/" + filepath.Base(path))
		seen["ns/"+filepath.Base(path)] = fmt.Sprint("as ours: ", its == ours)
	}
	volatile := regexp.MustCompile(`(?m)^(FDSize|SigQ|Vm\w*|Rss\w*|Hugetlb\w*|voluntary\w*|nonvoluntary\w*|x86_\w*|PPid):.*\n`)
	inside := regexp.MustCompile(`(?m)^(NS\w+:\s+\d+)\s+\d+$`) // pids of the namespace are counted
	seen["status"] = inside.ReplaceAllString(volatile.ReplaceAllString(read(proc+"/status"), ""), "$1")
	// What libcontainer's init binds is a slave of a mount that the node shares.
	ids := regexp.MustCompile(`(?m)^\d+ \d+ \d+:\d+ |master:\d+ `)
	// Newer kernels list them in the order in which they were made, which is another.
	mounts := slices.Sorted(strings.Lines(ids.ReplaceAllString(read(proc+"/mountinfo"), "")))
	seen["mountinfo"] = strings.Join(mounts, "")
	stat := strings.Fields(read(proc + "/stat"))
	seen["group, session, terminal"] = strings.Join(stat[4:7], " ")
	seen["priority, nice, threads"] = strings.Join(stat[17:20], " ")
	seen["keyring"] = keyring(id)
	seen["seccomp"] = seccompOf(t, pid)
	seen["root of who joins the mounts"] = rootOfJoined(pid)
	for _, enter := range []string{"--uts hostname", "--ipc cat /proc/sys/kernel/shm_rmid_forced /proc/sys/kernel/msgmax"} {
		output, status := command(t, "nsenter", append([]string{"--target", strconv.Itoa(pid)}, strings.Fields(enter)...)...)
		seen[enter] = fmt.Sprint(output, status)
	}
	for key, value := range seen {
		seen[key] = strings.NewReplacer(id, "ID", proc+"/", "/proc/PID/").Replace(value)
	}
	// Nowhere else: a limit, a user or a system call may have the pid's number.
	own := regexp.MustCompile(`(?m)^(Tgid:|Pid:|NS\w+:)\s+` + strconv.Itoa(pid) + `$`)
	seen["status"] = own.ReplaceAllString(seen["status"], "$1 PID")
	group := regexp.MustCompile(`\b` + strconv.Itoa(pid) + `\b`)
	seen["group, session, terminal"] = group.ReplaceAllString(seen["group, session, terminal"], "PID")
	return seen
}

// rootOfJoined lists the root that a process gets that joins the mount namespace of another, and what is above it.
func rootOfJoined(pid int) string {
	var names []string
	err := process.OnDisposableThread(func() error {
		mounts, err := os.Open(fmt.Sprintf("/proc/%d/ns/mnt", pid))
		if err != nil {
			return err
		}
		defer mounts.Close()
		// Threads share the working directory, and one that does cannot join.
		if err := errors.Join(unix.Unshare(unix.CLONE_FS), unix.Setns(int(mounts.Fd()), unix.CLONE_NEWNS)); err != nil {
			return err
		}
		for _, dir := range []string{"/", "/.."} {
			entries, err := os.ReadDir(dir)
			if err != nil {
				return err
			}
			for _, entry := range entries {
				names = append(names, entry.Name())
			}
		}
		return nil
	})
	return fmt.Sprint(names, err)
}

// keyring is the session keyring of a container: permissions, owner, name. That of
// one that has ended may still be there for a while.
func keyring(id string) string {
	for line := range strings.Lines(read("/proc/keys")) {
		if fields := strings.Fields(line); strings.Contains(line, "_ses."+id) {
			return strings.Join(fields[4:], " ")
		}
	}
	return "none"
}

// filtersOf are the seccomp filters that a process has loaded, newest first, as
// ptrace(2) gives them to its caller, who waits for the process by that.
func filtersOf(pid int) (filters []string, err error) {
	runtime.LockOSThread() // who traces is a thread
	defer runtime.UnlockOSThread()
	if err := errors.Join(unix.PtraceSeize(pid), unix.PtraceInterrupt(pid)); err != nil {
		return nil, err
	}
	if _, err := unix.Wait4(pid, nil, unix.WALL, nil); err != nil {
		return nil, err
	}
	for index := uintptr(0); ; index++ {
		var buffer [4096]bpf.RawInstruction
		n, _, errno := unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_SECCOMP_GET_FILTER, uintptr(pid), index, uintptr(unsafe.Pointer(&buffer)), 0, 0)
		if errno == unix.ENOENT || errno == unix.EINVAL {
			return filters, unix.PtraceDetach(pid)
		}
		if errno != 0 {
			return nil, errno
		}
		decisions, err := decisionsOf(buffer[:n])
		if err != nil {
			return nil, err
		}
		filters = append(filters, decisions)
	}
}

// decisionsOf are what a filter decides, on calls of some architectures with some arguments: each
// decision with the first number that it is of.
func decisionsOf(program []bpf.RawInstruction) (decisions string, err error) {
	instructions, _ := bpf.Disassemble(program)
	vm, err := bpf.NewVM(instructions)
	if err != nil {
		return "", err
	}
	for _, arch := range []uint32{unix.AUDIT_ARCH_X86_64, unix.AUDIT_ARCH_I386, unix.AUDIT_ARCH_AARCH64} {
		for _, first := range []uint32{0, 1, 2, 3, 8, 9, 0x10000000} { // an argument, as those of pause_test.go
			decisions += fmt.Sprintf("\n%x %x:", arch, first)
			last := -1
			for i := range uint32(1201) { // calls, those of x32, and none
				number := i%600 + i/600<<30
				if i == 1200 {
					number = math.MaxUint32
				}
				var call []byte // struct seccomp_data, which the machine takes for a packet
				for _, word := range []uint32{number, arch, 0, 0, 0, first, 0, 1} {
					call = binary.BigEndian.AppendUint32(call, word)
				}
				decision, err := vm.Run(append(call, make([]byte, 32)...))
				if err != nil {
					return "", err
				}
				if decision != last {
					decisions += fmt.Sprintf(" %x->%x", number, decision)
				}
				last = decision
			}
		}
	}
	return decisions, nil
}
