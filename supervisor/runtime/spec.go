package runtime

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// ReadSpec reads the OCI runtime specification of a bundle. Paths in it are
// made absolute: nothing here depends on the working directory.
func ReadSpec(bundle string) (*specs.Spec, error) {
	path := filepath.Join(bundle, "config.json")
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read the bundle: %w", err)
	}
	spec, err := parseSpec(content)
	if err != nil {
		return nil, fmt.Errorf("parse %s: %w", path, err)
	}
	if spec.Root == nil || spec.Process == nil || spec.Linux == nil {
		return nil, fmt.Errorf("parse %s: root, process and linux are needed", path)
	}
	if !filepath.IsAbs(spec.Root.Path) {
		spec.Root.Path = filepath.Join(bundle, spec.Root.Path)
	}
	return spec, nil
}

// parseSpec reads what Linux has of a specification: encoding/json would keep what it
// knows of the types of all other systems.
func parseSpec(content []byte) (*specs.Spec, error) {
	var linux struct {
		Version     string            `json:"ociVersion"`
		Process     *specs.Process    `json:"process"`
		Root        *specs.Root       `json:"root"`
		Hostname    string            `json:"hostname"`
		Domainname  string            `json:"domainname"`
		Mounts      []specs.Mount     `json:"mounts"`
		Hooks       *specs.Hooks      `json:"hooks"`
		Annotations map[string]string `json:"annotations"`
		Linux       *specs.Linux      `json:"linux"`
	}
	if err := json.Unmarshal(content, &linux); err != nil {
		return nil, err
	}
	return &specs.Spec{
		Version: linux.Version, Process: linux.Process, Root: linux.Root, Hostname: linux.Hostname, Domainname: linux.Domainname,
		Mounts: linux.Mounts, Hooks: linux.Hooks, Annotations: linux.Annotations, Linux: linux.Linux,
	}, nil
}

// DefaultHookLimit is how long a hook may take that has no limit of its own.
const DefaultHookLimit = 30 * time.Second

// startHooks names the hooks that init runs behind the barrier, in the container, and
// says how long they may take together; none is "".
func startHooks(hooks *specs.Hooks) (names string, limit time.Duration) {
	if hooks == nil {
		return "", 0
	}
	for _, hook := range hooks.StartContainer {
		if names != "" {
			names += ", "
		}
		names += hook.Path
		if hook.Timeout == nil {
			limit += DefaultHookLimit
		} else {
			limit += time.Duration(*hook.Timeout) * time.Second
		}
	}
	return names, limit
}

// oomScoreAdjFile keeps what an update has set, in the container's directory: the bundle
// has what the container was made with, and execs would get that.
func oomScoreAdjFile(dir string) string { return filepath.Join(dir, "oom_score_adj") }

// KeepOOMScoreAdj keeps the value for later execs, unless it is nil.
func KeepOOMScoreAdj(dir string, adjust *int) error {
	if adjust == nil {
		return nil
	}
	return os.WriteFile(oomScoreAdjFile(dir), []byte(strconv.Itoa(*adjust)), 0o600)
}

// WithOOMScoreAdj returns an exec's process with the container's oom_score_adj of now.
func WithOOMScoreAdj(dir string, process *specs.Process) *specs.Process {
	content, err := os.ReadFile(oomScoreAdjFile(dir))
	if err != nil {
		return process // no update has set it
	}
	adjust, err := strconv.Atoi(string(content))
	if err != nil {
		return process
	}
	changed := *process
	changed.OOMScoreAdj = &adjust
	return &changed
}
