package oci

import (
	"errors"
	"fmt"
	"slices"

	"github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/pkg/cdi"
)

// containerCDI adds what the vendors of the asked devices say that they need:
// nodes, mounts, variables, hooks. A device that no file describes is an error.
func containerCDI(c *Container, spec *specs.Spec) error {
	devices, err := cdiDevices(c)
	if err != nil || len(devices) == 0 {
		return err
	}
	if c.CDI == nil {
		return fmt.Errorf("CDI devices %q: this runtime has no CDI directories", devices)
	}
	if _, err := c.CDI.InjectDevices(spec, devices...); err != nil {
		return errors.Join(fmt.Errorf("CDI devices %q: %w", devices, err), c.cdiErrors())
	}
	return nil
}

// cdiDevices are those of the CRI's field and those of annotations, the older
// way, which the kubelet sends as well.
func cdiDevices(c *Container) ([]string, error) {
	_, annotated, err := cdi.ParseAnnotations(c.Config.GetAnnotations())
	if err != nil {
		return nil, fmt.Errorf("CDI annotations: %w", err)
	}
	var devices []string
	for _, device := range c.Config.GetCDIDevices() {
		devices = append(devices, device.GetName())
	}
	for _, device := range annotated {
		if !slices.Contains(devices, device) {
			devices = append(devices, device)
		}
	}
	return devices, nil
}

// cdiErrors lists the files that could not be read: the device may be in one.
func (c *Container) cdiErrors() error {
	var all []error
	for file, errs := range c.CDI.GetErrors() {
		all = append(all, fmt.Errorf("%s: %w", file, errors.Join(errs...)))
	}
	return errors.Join(all...)
}
