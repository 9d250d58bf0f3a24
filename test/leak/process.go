package leak

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// process is one process as /proc/PID/stat describes it, see proc(5).
type process struct {
	pid, parent int
	started     string // clock ticks after boot: pid and start are unique
	state       string // one letter, Z for a zombie
	command     string // at most 15 bytes
}

// addProcesses adds the processes that run one of the executables, that
// descend from one of the ancestors, or that carry one of the marks.
func (s Snapshot) addProcesses(scope Scope) error {
	if len(scope.Executables) == 0 && len(scope.Ancestors) == 0 && len(scope.Marks) == 0 {
		return nil
	}
	all, err := processes()
	if err != nil {
		return err
	}
	waiting := make(map[int]bool) // by supervisor
	for _, p := range all {
		if slices.Contains(scope.Except, p.pid) {
			continue
		}
		// One starter waits ready for each supervisor; a second one is left behind.
		if slices.Contains(scope.Except, p.parent) && !waiting[p.parent] && p.isStarter() {
			waiting[p.parent] = true
			continue
		}
		if p.runs(scope.Executables) || p.descends(scope.Ancestors, all) || p.carries(scope.Marks) {
			name := fmt.Sprintf("%s pid %d started %s", p.command, p.pid, p.started)
			s.add(Process, name, "", fmt.Sprintf("state %s, parent %d", p.state, p.parent))
		}
	}
	return nil
}

func (p process) isStarter() bool {
	line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", p.pid))
	return string(line) == "minicri-shim\x00start\x00"
}

func (p process) runs(executables []string) bool {
	if slices.Contains(executables, p.command) {
		return true
	}
	// A deleted executable keeps its path, with a remark behind it; one that
	// was in memory only has a remark in front, too.
	path, _ := os.Readlink(fmt.Sprintf("/proc/%d/exe", p.pid))
	base := strings.TrimPrefix(filepath.Base(strings.TrimSuffix(path, " (deleted)")), "memfd:")
	return slices.Contains(executables, base)
}

func (p process) carries(marks []string) bool {
	if len(marks) == 0 {
		return false
	}
	for _, name := range []string{"cmdline", "environ", "cgroup"} {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/%s", p.pid, name))
		for _, mark := range marks {
			if bytes.Contains(text, []byte(mark)) {
				return true
			}
		}
	}
	return false
}

func (p process) descends(ancestors []int, all map[int]process) bool {
	// Every step goes up to a parent. The limit guards against a circle that
	// pids reused while they were read would make.
	for range all {
		if slices.Contains(ancestors, p.parent) {
			return true
		}
		parent, ok := all[p.parent]
		if !ok {
			return false
		}
		p = parent
	}
	return false
}

func processes() (map[int]process, error) {
	pids, err := processIDs()
	if err != nil {
		return nil, err
	}
	all := make(map[int]process, len(pids))
	for _, pid := range pids {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if gone(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if all[pid], err = parseStat(pid, stat); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// parseStat reads "PID (COMMAND) STATE PPID ... STARTTIME ...". The command may
// hold blanks and parentheses itself, so the fields begin after the last one.
func parseStat(pid int, stat []byte) (process, error) {
	open, closed := bytes.IndexByte(stat, '('), bytes.LastIndexByte(stat, ')')
	if open < 0 || closed < open {
		return process{}, fmt.Errorf("/proc/%d/stat has no command: %q", pid, stat)
	}
	fields := strings.Fields(string(stat[closed+1:]))
	const state, parent, started = 0, 1, 19 // fields 3, 4 and 22 of proc(5)
	if len(fields) <= started {
		return process{}, fmt.Errorf("/proc/%d/stat is too short: %q", pid, stat)
	}
	parentID, err := strconv.Atoi(fields[parent])
	if err != nil {
		return process{}, fmt.Errorf("/proc/%d/stat has no parent: %w", pid, err)
	}
	return process{pid, parentID, fields[started], fields[state], string(stat[open+1 : closed])}, nil
}

func processIDs() ([]int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, entry := range entries {
		if pid, err := strconv.Atoi(entry.Name()); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

func command(pid int) string {
	name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	return strings.TrimSpace(string(name))
}
