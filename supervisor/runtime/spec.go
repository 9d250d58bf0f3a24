package runtime

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

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
	spec := new(specs.Spec)
	if err := json.Unmarshal(content, spec); err != nil {
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
