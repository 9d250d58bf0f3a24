package machine

import (
	"context"
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"strings"
)

// DefaultProfile is the name of the AppArmor profile of containers that ask for
// the runtime's default.
const DefaultProfile = "minicri-default"

// apparmorParser turns profiles into what the kernel reads, apparmor_parser(8).
const apparmorParser = "apparmor_parser"

// The profile is written out here instead of by a library: those there are
// need text/template, which makes the linker keep every method of every type,
// a tenth of the daemon's memory.
//
//go:embed default.profile
var defaultProfile string

// appArmorSupported reports whether profiles can be loaded and applied: the kernel has
// AppArmor switched on, and the parser is installed. In many containers that
// serve as nodes the first is true and the second is not.
func appArmorSupported() bool {
	enabled, err := os.ReadFile("/sys/module/apparmor/parameters/enabled")
	if err != nil || !strings.HasPrefix(string(enabled), "Y") {
		return false
	}
	_, err = exec.LookPath(apparmorParser)
	return err == nil
}

// LoadDefaultProfile loads the default profile, or replaces the one that an earlier
// daemon loaded. Processes that it confines already follow the new one.
func LoadDefaultProfile(ctx context.Context) error {
	// The cache would be read from, and written to, a directory of the machine.
	command := exec.CommandContext(ctx, apparmorParser, "--replace", "--skip-cache")
	command.Stdin = strings.NewReader(renderProfile(ownProfile()))
	if output, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("load the AppArmor profile %s: %v: %w: %s", DefaultProfile, command, err, output)
	}
	return nil
}

// renderProfile fills in the profile for a daemon under the given one.
func renderProfile(daemon string) string {
	return strings.NewReplacer("@PROFILE@", DefaultProfile, "@DAEMON@", daemon).Replace(defaultProfile)
}

// ownProfile is the profile that confines this process: it sends the signals.
func ownProfile() string {
	current, err := os.ReadFile("/proc/self/attr/apparmor/current")
	if err != nil {
		current, _ = os.ReadFile("/proc/self/attr/current") // before Linux 5.1
	}
	name, _, _ := strings.Cut(strings.TrimSpace(string(current)), " (") // "NAME (enforce)"
	if name == "" {
		return "unconfined"
	}
	return name
}
