package container

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/trace"
	"github.com/minicri/minicri/oci"
)

// makeSources makes the directories of the node that the container's mounts come
// from, when all of them answer.
func (c *creation) makeSources(ctx context.Context) error {
	if err := c.owner.awaitHostPaths(ctx, c.config.GetMounts()); err != nil {
		return err
	}
	images, err := c.imageSources()
	if err != nil {
		return err
	}
	o := c.owner.options
	c.parts = &oci.Container{
		ID: c.ID, SandboxID: c.SandboxID, Pod: c.sandbox.Config(), Config: c.config, Image: imageFacts(c.image),
		Rootfs: c.owner.rootfs(c.ID), Hostname: o.Sandboxes.Hostname(c.sandbox), Files: o.Sandboxes.PodFiles(c.sandbox),
		VolumesDir: c.owner.volumes(c.ID), ImageMounts: images,
		CgroupsPath: c.CgroupsPath, PidsLimit: o.PidsLimit, Machine: o.Machine, Defaults: c.owner.defaultsOf(c.sandbox), SELinux: c.labels,
	}
	return makeSources(c.parts)
}

// fillVolumes makes the volumes that the image declares, with what the image has
// in their place.
func (c *creation) fillVolumes(context.Context) error {
	volumes := oci.ImageVolumes(c.parts)
	if len(volumes) == 0 {
		return nil
	}
	if err := makePrivate(c.parts.VolumesDir, rootOf(c.parts.Pod)); err != nil {
		return err
	}
	if err := readUsers(c.parts); err != nil {
		return err
	}
	user, err := oci.ProcessUser(c.parts)
	if err != nil {
		return err
	}
	uid, gid := oci.HostUser(c.parts.Pod, user)
	return fillVolumes(c.parts.Rootfs, volumes, owner{uid, gid})
}

// writeSpec makes the runtime-spec and puts it where the supervisor reads it.
func (c *creation) writeSpec(ctx context.Context) (err error) {
	if c.parts.Namespaces, err = c.namespaces(); err != nil {
		return err
	}
	if c.parts.CDI, err = vendorDevices(c.config); err != nil {
		return err
	}
	if err := readUsers(c.parts); err != nil {
		return err
	}
	if c.spec, err = oci.ForContainer(c.parts); err != nil {
		return err
	}
	return c.storeSpec(ctx)
}

// vendorDevices are the devices that vendors describe now; nil for a container that asks
// for none. Their files are parsed for each container that does, because they may change
// at any time.
func vendorDevices(config *runtimeapi.ContainerConfig) (oci.CDI, error) {
	_, annotated, err := cdi.ParseAnnotations(config.GetAnnotations())
	if err != nil {
		return nil, fmt.Errorf("CDI annotations: %w", err)
	}
	if len(annotated) == 0 && len(config.GetCDIDevices()) == 0 {
		return nil, nil
	}
	return cdi.NewCache(cdi.WithAutoRefresh(false))
}

// storeSpec puts the spec where the supervisor reads it.
func (c *creation) storeSpec(ctx context.Context) error {
	traceHooks(c.spec.Hooks, trace.Environment(ctx))
	encoded, err := json.Marshal(c.spec)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(c.owner.dir(c.ID), specFile), encoded, 0o600)
}

// traceHooks gives hooks the span that they belong to, in their environment.
func traceHooks(hooks *specs.Hooks, variables []string) {
	if hooks == nil || len(variables) == 0 {
		return
	}
	for _, kind := range [][]specs.Hook{hooks.CreateRuntime, hooks.CreateContainer, hooks.StartContainer, hooks.Poststart, hooks.Poststop, hooks.Prestart} {
		for i := range kind {
			known := slices.ContainsFunc(kind[i].Env, func(v string) bool { return strings.HasPrefix(v, "TRACEPARENT=") })
			if !known {
				kind[i].Env = slices.Concat(kind[i].Env, variables)
			}
		}
	}
}

// specFile is the runtime-spec in a container's directory, its bundle.
const specFile = "config.json"

// relabel gives the sources of mounts the labels of the container.
func (c *creation) relabel(context.Context) error { return relabel(c.parts) }

func imageFacts(i image.Image) oci.Image {
	config := i.Spec.Config
	facts := oci.Image{
		Entrypoint: config.Entrypoint, Cmd: config.Cmd, Env: config.Env, WorkingDir: config.WorkingDir,
		User: config.User,
	}
	for volume := range config.Volumes {
		facts.Volumes = append(facts.Volumes, volume)
	}
	return facts
}
