package process

import (
	"fmt"
	"os"
	"strings"
)

// BootID names the boot that the machine is in
// (/proc/sys/kernel/random/boot_id): pids and start times are of one boot.
func BootID() (string, error) {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the boot id: %w", err)
	}
	return strings.TrimSpace(string(id)), nil
}
