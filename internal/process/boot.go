package process

import (
	"fmt"
	"os"
	"strings"
)

// BootID names the boot that the node is in. Processes, their pids and start times
// are of one boot. That is the machine's (/proc/sys/kernel/random/boot_id); where
// the node is a container, in a pid namespace of its own, the start of the first
// process there goes with it: a container that is started again is a node that has
// booted, whatever its volatile directory has kept.
func BootID() (string, error) {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the boot id: %w", err)
	}
	id := strings.TrimSpace(string(data))
	namespace, err := os.Readlink("/proc/self/ns/pid")
	if err != nil {
		return "", fmt.Errorf("read the boot id: %w", err)
	}
	if namespace == machineNamespace {
		return id, nil
	}
	first, err := ReadStat(1)
	if err != nil {
		return "", fmt.Errorf("read the boot id: %w", err)
	}
	return fmt.Sprint(id, separator, first.StartTime), nil
}

const (
	// machineNamespace is the first pid namespace (PROC_PID_INIT_INO of
	// linux/proc_ns.h).
	machineNamespace = "pid:[4026531836]"
	separator        = "+"
)

// SameBoot reports whether what was noted is of the boot that BootID names. A
// version that did not know of containers noted the machine's alone.
func SameBoot(noted, boot string) bool {
	machine, _, _ := strings.Cut(boot, separator)
	return noted == boot || noted == machine
}
