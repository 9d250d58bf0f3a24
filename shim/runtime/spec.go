package runtime

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	_ "github.com/opencontainers/cgroups/devices" // without it libcontainer cannot apply device rules
	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runc/libcontainer/specconv"
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

// parseSpec reads what Linux has of a specification: what encoding/json keeps of all
// the types of the other systems, for good, is 50 KiB of each supervisor of a pod.
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

// toConfig translates a specification to libcontainer's terms.
func toConfig(spec *specs.Spec, id string, systemdCgroup, noNewKeyring bool) (*configs.Config, error) {
	if err := clampOOMScoreAdj(spec.Process); err != nil {
		return nil, err
	}
	config, err := specconv.CreateLibcontainerConfig(&specconv.CreateOpts{
		CgroupName:       id,
		UseSystemdCgroup: systemdCgroup,
		NoNewKeyring:     noNewKeyring,
		Spec:             spec,
	})
	if err != nil {
		return nil, fmt.Errorf("translate the specification: %w", err)
	}
	return config, nil
}
