package contender

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"
)

// Row compares two runtimes in one number.
type Row struct {
	What         string // with its unit
	Ours, Theirs float64
	// AtMost is the goal of the ratio of ours to theirs, MostOfOurs that of our number
	// alone; 0 is none. Theirs is 0 where the other one is not measured.
	AtMost, MostOfOurs float64
}

// PrintTable prints rows with their goals and whether they are reached.
func PrintTable(rows ...Row) {
	table := tabwriter.NewWriter(os.Stdout, 0, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(table, "\n\t%s\t%s\tratio\tto reach\t\t\n", Minicri, Containerd)
	for _, r := range rows {
		theirs, ratio, goal, reached := "-", "-", "", true
		if r.Theirs != 0 {
			theirs, ratio = fmt.Sprintf("%.4g", r.Theirs), fmt.Sprintf("%.2f", r.Ours/r.Theirs)
		}
		switch {
		case r.AtMost > 0:
			goal, reached = fmt.Sprintf("ratio <= %g", r.AtMost), r.Ours/r.Theirs <= r.AtMost
		case r.MostOfOurs > 0:
			goal, reached = fmt.Sprintf("<= %g", r.MostOfOurs), r.Ours <= r.MostOfOurs
		}
		fmt.Fprintf(table, "%s\t%.4g\t%s\t%s\t%s\t%s\t\n", r.What, r.Ours, theirs, ratio, goal, verdict(goal, reached))
	}
	Check(table.Flush())
}

func verdict(goal string, reached bool) string {
	switch {
	case goal == "":
		return ""
	case reached:
		return "✓"
	}
	return "✗"
}

// Sample are durations of one thing, by the node.
type Sample [2][]time.Duration

// Time adds what do takes with a node.
func (s *Sample) Time(node int, do func()) {
	began := time.Now()
	do()
	s[node] = append(s[node], time.Since(began))
}

// Times are durations by the name of what took them.
type Times map[string][]time.Duration

// Time adds what do takes.
func (t Times) Time(name string, do func()) {
	began := time.Now()
	do()
	t[name] = append(t[name], time.Since(began))
}

// P50 is a median in milliseconds.
func (t Times) P50(name string) float64 { return Milliseconds(Quantile(t[name], 0.5)) }

// Medians fills in the medians of durations, in milliseconds.
func (r Row) Medians(of Sample) Row {
	for i, number := range []*float64{&r.Ours, &r.Theirs} {
		if len(of[i]) > 0 {
			*number = Milliseconds(Quantile(of[i], 0.5))
		}
	}
	return r
}

// Quantile is that of values: 0.5 is the median.
func Quantile[T cmp.Ordered](values []T, q float64) T {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[min(len(sorted)-1, int(q*float64(len(sorted))))]
}

// Milliseconds are for people.
func Milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// Alternate does one thing with each of two nodes in every round, in turn.
func Alternate(rounds int, do func(round, node int)) {
	for round := range rounds {
		for i := range 2 {
			do(round, (round+i)%2)
		}
	}
}

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
