//go:build failpoints

package failpoint

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"
)

// Hit does what the file says for the point: each line is a name, a tab and "error", "kill" (SIGKILL of this
// process), "hang" (until the line is gone) or "mark" (go on). It first writes the name to the file's name.hit.
func Hit(name string) error {
	action := actionFor(name)
	if action != "" {
		if err := os.WriteFile(file()+".hit", []byte(name+"\n"), 0o600); err != nil {
			return err
		}
	}
	switch action {
	case "error":
		return fmt.Errorf("failpoint %s", name)
	case "kill":
		if err := syscall.Kill(os.Getpid(), syscall.SIGKILL); err != nil {
			return err
		}
		select {}
	case "hang":
		for actionFor(name) == "hang" {
			time.Sleep(5 * time.Millisecond)
		}
	}
	return nil
}

// Environ is for another process that has points of its own.
func Environ() []string { return []string{"MINICRI_FAILPOINTS=" + file()} }

func file() string { return os.Getenv("MINICRI_FAILPOINTS") }

func actionFor(name string) string {
	data, err := os.ReadFile(file())
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(data)) {
		point, action, _ := strings.Cut(strings.TrimSpace(line), "\t")
		if point == name {
			return action
		}
	}
	return ""
}
