package contender

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// tick is the unit of times in /proc/PID/stat on Linux, USER_HZ of 100.
const tick = 10 * time.Millisecond

// CPU is the user and system time of a process since its start, in ticks of 10 ms, without or with that of the
// children which it waited for: proc_pid_stat(5), fields 14 to 17. Of one that has ended it is 0.
func CPU(pid int, withChildren bool) (sum time.Duration) {
	data := procFile(pid, "stat")
	if data == nil {
		return 0
	}
	last := 13
	if withChildren {
		last = 15
	}
	for _, field := range strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:]))[11:last] { // the first is field 3
		sum += time.Duration(Must(strconv.ParseInt(field, 10, 64))) * tick
	}
	return sum
}

// Memory is what the node cannot take back from a process, in KiB: its anonymous and shmem
// pages. Pages of its program and of other files are not counted: the kernel drops them when
// memory is short, after it has written those that are dirty. Private_Dirty says nothing
// else, but that a program that was built just now has 10 MiB which are not written yet.
func Memory(pid int) (kib int) {
	if rollup := procFile(pid, "smaps_rollup"); rollup != nil {
		kib = field(rollup, "Anonymous") + field(rollup, "Pss_Shmem")
	}
	return kib
}

func field(of []byte, name string) (kib int) {
	for line := range strings.Lines(string(of)) {
		if value, found := strings.CutPrefix(line, name+":"); found {
			Must(fmt.Sscanf(value, "%d kB", &kib))
			return kib
		}
	}
	panic(failure{fmt.Errorf("there is no %s in %s", name, of)})
}

// procFile is nil of a process that has ended: a shim was there to start pause.
func procFile(pid int, name string) []byte {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
		return nil
	}
	return Must(data, err)
}

// named lists the processes of this pid namespace by their name (proc_pid_comm(5): at most 15 characters).
func named(name string) (pids []int) {
	for _, path := range Must(filepath.Glob("/proc/[0-9]*")) {
		pid := Must(strconv.Atoi(filepath.Base(path)))
		if strings.TrimSpace(string(procFile(pid, "comm"))) == name {
			pids = append(pids, pid)
		}
	}
	return pids
}

// PID is the daemon's.
func (n *Node) PID() int { return n.command.Process.Pid }

func (n *Node) shims() []int {
	return named(map[string]string{Minicri: "minicri-shim", Containerd: "containerd-shim"}[n.Name])
}

// CPU is what the daemon and all its shims have used, not what their containers have; with children it is also that
// of processes which have ended: helpers that set containers up, and the containers.
func (n *Node) CPU(withChildren bool) (sum time.Duration) {
	for _, pid := range append(n.shims(), n.PID()) {
		sum += CPU(pid, withChildren)
	}
	return sum
}

// Owner is what processes of one kind hold.
type Owner struct{ Processes, Threads, KiB int }

// MiB is its memory.
func (o Owner) MiB() float64 { return float64(o.KiB) / 1024 }

// Owners are the daemon, its shims and the pause processes of the node's pods.
type Owners struct{ Daemon, Shims, Pauses Owner }

// KiB is the memory of all: what the node's pods cost beside their own processes.
func (o Owners) KiB() int { return o.Daemon.KiB + o.Shims.KiB + o.Pauses.KiB }

// Owners weighs what runs for the node's pods.
func (n *Node) Owners() Owners {
	var pauses []int
	for _, pid := range named("pause") {
		if strings.Contains(string(procFile(pid, "cgroup")), n.CgroupParent()+"/") {
			pauses = append(pauses, pid)
		}
	}
	return Owners{ownerOf(n.PID()), ownerOf(n.shims()...), ownerOf(pauses...)}
}

func ownerOf(pids ...int) (o Owner) {
	for _, pid := range pids {
		if kib := Memory(pid); kib > 0 {
			threads, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid)) // none of one that has ended
			o.Processes, o.Threads, o.KiB = o.Processes+1, o.Threads+len(threads), o.KiB+kib
		}
	}
	return o
}
