package harness

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// SupervisorEnv names the variable that makes every node of a test run its pods
// under supervisors of this kind, node or pod, unless the test says otherwise.
const SupervisorEnv = "MINICRI_TEST_SUPERVISOR"

// OneSupervisor reports whether the pods of a node share a supervisor.
func OneSupervisor() bool { return os.Getenv(SupervisorEnv) != "pod" }

// supervisorConfig is that of the environment, "" for the daemon's default.
func supervisorConfig() string {
	if kind := os.Getenv(SupervisorEnv); kind != "" {
		return "supervisor = \"" + kind + "\"\n"
	}
	return ""
}

// Supervisors are the processes that supervise the node's pods: that of the
// node, and those of single pods.
func (n *Node) Supervisors() (node, pods []int) {
	lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range lines {
		line, _ := os.ReadFile(path)
		words := strings.Split(string(line), "\x00")
		if len(words) <= 3 || words[1] != "serve" || !strings.HasPrefix(words[3], n.State+"/") {
			continue
		}
		pid, _ := strconv.Atoi(strings.Split(path, "/")[2])
		if filepath.Base(words[3]) == "node" {
			node = append(node, pid)
		} else {
			pods = append(pods, pid)
		}
	}
	return node, pods
}
