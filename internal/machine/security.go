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

// The profile is written out here instead of by a library: those there are
// need text/template, which makes the linker keep every method of every type,
// a tenth of the daemon's memory.
//
//go:embed default.profile
var defaultProfile string

// appArmorSupported reports whether the kernel has AppArmor on and the parser is installed,
// which it is not in many containers that serve as nodes.
func appArmorSupported() bool {
	enabled, err := os.ReadFile("/sys/module/apparmor/parameters/enabled")
	if err != nil || !strings.HasPrefix(string(enabled), "Y") {
		return false
	}
	_, err = exec.LookPath("apparmor_parser")
	return err == nil
}

// LoadDefaultProfile loads the default profile; processes that an earlier one confines follow
// it.
func LoadDefaultProfile(ctx context.Context) error {
	// The cache would be read from, and written to, a directory of the machine.
	command := exec.CommandContext(ctx, "apparmor_parser", "--replace", "--skip-cache")
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

// checkSELinuxPolicy reports why the policy cannot confine containers: it names no labels for
// them (selinux(8), lxc_contexts), or does not know the one that it names.
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

// NewLabels makes the labels of a process and of its files, with a level that no other pod has
// unless an option names one; "" without SELinux.
func (m Machine) NewLabels(options []string) (process, mount string, err error) {
	if !m.SELinux {
		return "", "", nil
	}
	if process, mount, err = label.InitLabels(options); err != nil {
		return "", "", fmt.Errorf("make SELinux labels of %q: %w", options, err)
	}
	return process, mount, nil
}

// ReserveLevel keeps the level of a label for its pod over a restart of the daemon.
func (m Machine) ReserveLevel(process string) {
	if m.SELinux {
		selinux.ReserveLabel(process)
	}
}

// ReleaseLevel is the end of ReserveLevel, and of NewLabels.
func (m Machine) ReleaseLevel(process string) {
	if m.SELinux {
		selinux.ReleaseLabel(process)
	}
}

// neverRelabelled are directories that the node itself needs with their labels.
var neverRelabelled = []string{
	"/", "/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/lib64", "/media", "/mnt", "/opt", "/proc", "/root", "/run", "/sbin",
	"/srv", "/sys", "/tmp", "/usr", "/usr/bin", "/usr/lib", "/usr/local", "/usr/sbin", "/usr/share", "/var", "/var/lib", "/var/log", "/var/run",
}

// CheckRelabel reports why a path of the node must not be relabelled.
func CheckRelabel(path string) error {
	if slices.Contains(neverRelabelled, filepath.Clean(path)) {
		return fmt.Errorf("%s is needed by the node with the SELinux labels that it has", path)
	}
	return nil
}

// RelabelForAll gives a directory of the daemon's, and all below it, the label of files that
// every container may use: an enforced policy lets none execute it without.
func (m Machine) RelabelForAll(path string) error {
	if !m.SELinux || m.SELinuxProblem != "" {
		return nil
	}
	process, mount := selinux.ContainerLabels()
	defer selinux.ReleaseLabel(process)
	return m.Relabel(path, mount, true)
}

// LabelLayers makes the directory of the layers of images, whose label what is made in it
// inherits: every container may read them and none may write. The label of the mounts is not
// enough: what a program maps is checked by the layer's file too.
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
	// The directory comes last: it shows that all is done.
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

// Relabel gives a path, and all below it, the label of a container's files, with shared that of
// all containers'. A file system without labels stays as it is.
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
