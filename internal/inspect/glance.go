package inspect

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/redact"
	"github.com/minicri/minicri/internal/timeline"
	"github.com/minicri/minicri/sandbox"
)

// Glance looks at all pods of the node.
func (n *Node) Glance(ctx context.Context) *timeline.Glance {
	g := &timeline.Glance{At: time.Now(), Pods: []timeline.Line{}}
	measured := make(map[string]*runtimeapi.PodSandboxStats)
	for _, stats := range n.Measure(ctx) {
		measured[stats.GetAttributes().GetId()] = stats
	}
	supervisors := supervisorsOf(n.State)
	for _, pid := range supervisors {
		g.Supervisors += memoryOf(pid)
	}
	g.Daemon = memoryOf(os.Getpid())
	problems, listed := n.attachmentProblems(), n.Sandboxes.List()
	share := uint64(0)
	if len(listed) > 0 {
		share = g.Supervisors / uint64(len(listed))
	}
	for i, sb := range append(listed, n.Sandboxes.Building()...) {
		line := n.line(sb, i >= len(listed))
		line.Problems = problems[sb.ID]
		delete(problems, sb.ID)
		line.Runtime = share + memoryOf(sb.Facts().Pause.PID)
		addStats(&line, measured[sb.ID])
		g.Pods = append(g.Pods, line)
	}
	g.Released = len(problems)
	older, _ := n.Sandboxes.OlderSupervisors() // those that can be read
	for _, one := range older {
		g.Older = append(g.Older, timeline.Older{Build: one.Group, Version: one.Version, Pods: one.Pods, Problem: one.Problem})
	}
	slices.SortFunc(g.Pods, func(a, b timeline.Line) int { return strings.Compare(a.Name+a.ID, b.Name+b.ID) })
	return g
}

func (n *Node) line(sb *sandbox.Sandbox, building bool) timeline.Line {
	head := headOf(sb.ID, sb.Config().GetMetadata())
	line := timeline.Line{ID: sb.ID, Name: head.Name, State: stateOf(sb.Facts(), building), Created: time.Unix(0, sb.CreatedAt)}
	if stage := sb.Stage(); stage != nil {
		line.Stage, line.For = stage.Step, stage.Took
	}
	for _, address := range n.Sandboxes.LiveAddresses(sb) {
		line.Addresses = append(line.Addresses, address.String())
	}
	for _, c := range n.Containers.ListPod(sb.ID) {
		line.Containers++
		if c.State() == runtimeapi.ContainerState_CONTAINER_RUNNING {
			line.Running++
		}
	}
	return line
}

// attachmentProblems are what is wrong with attachments, by pod.
func (n *Node) attachmentProblems() map[string][]string {
	problems := make(map[string][]string)
	for _, a := range n.Networks.Pending() {
		problems[a.ID] = append(problems[a.ID], redact.Text(fmt.Sprintf("CNI DEL of %s has failed %d times: %s", a.Network, a.Tries, a.LastError)))
	}
	for _, d := range n.Networks.Drifted() {
		problems[d.ID] = append(problems[d.ID], redact.Text(fmt.Sprintf("CNI CHECK of %s: %s", d.Network, d.Error)))
	}
	return problems
}

func addStats(line *timeline.Line, stats *runtimeapi.PodSandboxStats) {
	linux := stats.GetLinux()
	line.Memory = linux.GetMemory().GetWorkingSetBytes().GetValue()
	line.CPU = linux.GetCpu().GetUsageCoreNanoSeconds().GetValue()
	line.Received = linux.GetNetwork().GetDefaultInterface().GetRxBytes().GetValue()
	line.Sent = linux.GetNetwork().GetDefaultInterface().GetTxBytes().GetValue()
}

// supervisorsOf are the processes that serve below a daemon's volatile directory.
func supervisorsOf(stateDir string) (pids []int) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil // then their memory is not known
	}
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		line, _ := os.ReadFile(filepath.Join("/proc", entry.Name(), "cmdline"))
		arguments := strings.Split(string(line), "\x00")
		if len(arguments) < 2 || arguments[1] != "serve" {
			continue
		}
		if slices.ContainsFunc(arguments, func(a string) bool { return strings.HasPrefix(a, filepath.Join(stateDir, "shims")+"/") }) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// memoryOf is what a process has of the memory, in bytes: pages that it shares
// count in part (Pss in proc_pid_smaps_rollup, proc(5)); 0 if it is not there.
func memoryOf(pid int) uint64 {
	if pid <= 0 {
		return 0
	}
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(data)) {
		var kib uint64
		if _, err := fmt.Sscanf(line, "Pss: %d kB", &kib); err == nil {
			return kib << 10
		}
	}
	return 0
}
