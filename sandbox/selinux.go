package sandbox

import (
	"encoding/json"
	"os"
	"path/filepath"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/minicri/minicri/oci"
)

// makeLabels makes the SELinux labels of the pod. Its level is its own until
// removeFiles gives it back.
func (c *creation) makeLabels() (err error) {
	c.labels.Process, c.labels.Mount, err = c.owner.options.Machine.NewLabels(oci.SandboxSELinux(c.config))
	return err
}

// SELinux are the labels of the sandbox's pause process, which its containers
// share the level of; none on a machine without SELinux.
func (s *Store) SELinux(sb *Sandbox) oci.SELinux { return s.labels(sb.ID) }

// labels are read from the spec of pause: what it was started with.
func (s *Store) labels(id string) oci.SELinux {
	if !s.options.Machine.SELinux {
		return oci.SELinux{}
	}
	data, err := os.ReadFile(filepath.Join(s.Dir(id), "config.json"))
	if err != nil {
		return oci.SELinux{} // pause was never prepared, or its files are gone
	}
	spec := &specs.Spec{}
	if json.Unmarshal(data, spec) != nil || spec.Process == nil || spec.Linux == nil {
		return oci.SELinux{}
	}
	return oci.SELinux{Process: spec.Process.SelinuxLabel, Mount: spec.Linux.MountLabel}
}

// reserveLevels keeps the levels of the pods that an earlier daemon made.
func (s *Store) reserveLevels() {
	for id := range s.byID {
		s.options.Machine.ReserveLevel(s.labels(id).Process)
	}
}
