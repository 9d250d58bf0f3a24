package machine

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opencontainers/selinux/go-selinux"
	"github.com/opencontainers/selinux/go-selinux/label"
	"golang.org/x/sys/unix"
)

// DefaultProfile is the name of the default AppArmor profile.
const DefaultProfile = "minicri-default"

// A library for the profile would need text/template, for which the linker keeps every method of
// every type: a tenth of the daemon's memory.
//
//go:embed default.profile
var defaultProfile string

// appArmorSupported needs the parser, too, which many containers that serve as nodes do not have.
func appArmorSupported() bool {
	enabled, err := os.ReadFile("/sys/module/apparmor/parameters/enabled")
	if err != nil || !strings.HasPrefix(string(enabled), "Y") {
		return false
	}
	_, err = exec.LookPath("apparmor_parser")
	return err == nil
}

// LoadDefaultProfile loads the default profile, also for processes that an earlier one confines.
func LoadDefaultProfile(ctx context.Context) error {
	// The cache would be in a directory of the machine.
	command := exec.CommandContext(ctx, "apparmor_parser", "--replace", "--skip-cache")
	profile := strings.NewReplacer("@PROFILE@", DefaultProfile, "@DAEMON@", ownProfile()).Replace(defaultProfile)
	command.Stdin = strings.NewReader(profile)
	if output, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("load the AppArmor profile %s: %v: %w: %s", DefaultProfile, command, err, output)
	}
	return nil
}

// ownProfile returns the profile that confines this process, which sends the signals.
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

// checkSELinuxPolicy: the policy must have labels for containers (selinux(8), lxc_contexts), and know them.
func checkSELinuxPolicy() error {
	process, mount := selinux.ContainerLabels()
	if process == "" || mount == "" {
		return errors.New("the policy has no labels for containers: install the package container-selinux")
	}
	defer selinux.ReleaseLabel(process)
	for _, text := range []string{process, mount} {
		if err := selinux.SecurityCheckContext(text); err != nil {
			return fmt.Errorf("the policy does not know the label %s: install the package container-selinux: %w", text, err)
		}
	}
	return nil
}

// NewLabels makes labels with a level of their own, unless an option names it; "" without SELinux.
func (m Machine) NewLabels(options []string) (process, mount string, err error) {
	if !m.SELinux {
		return "", "", nil
	}
	if process, mount, err = label.InitLabels(options); err != nil {
		return "", "", fmt.Errorf("make SELinux labels of %q: %w", options, err)
	}
	return process, mount, nil
}

// ReserveLevel keeps a label's level for its pod over a restart of the daemon.
func (m Machine) ReserveLevel(process string) {
	if m.SELinux {
		selinux.ReserveLabel(process)
	}
}

// ReleaseLevel undoes ReserveLevel and NewLabels.
func (m Machine) ReleaseLevel(process string) {
	if m.SELinux {
		selinux.ReleaseLabel(process)
	}
}

// neverRelabelled are directories whose labels the node itself needs.
var neverRelabelled = []string{
	"/", "/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/lib64", "/media", "/mnt", "/opt", "/proc", "/root", "/run", "/sbin",
	"/srv", "/sys", "/tmp", "/usr", "/usr/bin", "/usr/lib", "/usr/local", "/usr/sbin", "/usr/share", "/var", "/var/lib", "/var/log", "/var/run",
}

// CheckRelabel reports why a path of the node must keep its label.
func CheckRelabel(path string) error {
	if slices.Contains(neverRelabelled, filepath.Clean(path)) {
		return fmt.Errorf("%s is needed by the node with the SELinux labels that it has", path)
	}
	return nil
}

// RelabelForAll labels a directory, and all below it, for all containers, so that they may execute it.
func (m Machine) RelabelForAll(path string) error {
	if !m.SELinux || m.SELinuxProblem != "" {
		return nil
	}
	process, mount := selinux.ContainerLabels()
	defer selinux.ReleaseLabel(process)
	return m.Relabel(path, mount, true)
}

// LabelLayers makes the directory of layers, whose label new files inherit: containers may read, not write.
// The mounts' label is not enough, because what a program maps is checked by the layer's file, too.
func (m Machine) LabelLayers(dir string) error {
	if !m.SELinux || m.SELinuxProblem != "" {
		return nil
	}
	process, _ := selinux.ContainerLabels()
	defer selinux.ReleaseLabel(process)
	//lint:ignore SA1019 nothing else says what the policy calls ro_file
	wanted := selinux.ROFileLabel()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make the directory of layers: %w", err)
	}
	if label, err := selinux.FileLabel(dir); errors.Is(err, unix.ENOTSUP) || err == nil && label == wanted {
		return nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("label layers: %w", err)
	}
	// The directory's label, set last, shows that all is done.
	for _, entry := range entries {
		if err := selinux.Chcon(filepath.Join(dir, entry.Name()), wanted, true); err != nil {
			return fmt.Errorf("label the layer %s: %w", entry.Name(), err)
		}
	}
	if err := selinux.SetFileLabel(dir, wanted); err != nil && !errors.Is(err, unix.ENOTSUP) {
		return fmt.Errorf("label the directory of layers %s: %w", dir, err)
	}
	return nil
}

// Relabel labels a path, and all below it, for a container, or all if shared.
func (m Machine) Relabel(path, mount string, shared bool) error {
	if !m.SELinux || mount == "" {
		return nil
	}
	if err := CheckRelabel(path); err != nil {
		return err
	}
	if err := label.Relabel(path, mount, shared); err != nil && !errors.Is(err, unix.ENOTSUP) {
		return fmt.Errorf("relabel %s: %w", path, err)
	}
	return nil
}
