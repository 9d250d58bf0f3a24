package container

import (
	"context"
	"fmt"
	"os"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/oci"
)

func (c *creation) makeRootfs(ctx context.Context) error {
	images := c.owner.options.Images
	if err := images.Prepare(ctx, c.ID, c.ImageID, prepareOptions(c.sandbox.Config())); err != nil {
		return err
	}
	if err := makePrivate(c.owner.dir(c.ID), rootOf(c.sandbox.Config())); err != nil {
		return err
	}
	if err := c.makeLabels(); err != nil {
		return err
	}
	if err := images.Mount(ctx, c.ID, c.owner.rootfs(c.ID), c.labels.Mount); err != nil {
		return err
	}
	return c.mountImages(ctx)
}

// prepareOptions shift the owners of files in a pod with a user namespace.
func prepareOptions(pod *runtimeapi.PodSandboxConfig) image.PrepareOptions {
	userns := oci.UserNamespace(pod)
	return image.PrepareOptions{UIDs: idMaps(userns.GetUids()), GIDs: idMaps(userns.GetGids())}
}

func idMaps(mappings []*runtimeapi.IDMapping) (maps []image.IDMap) {
	for _, m := range mappings {
		maps = append(maps, image.IDMap{ContainerID: m.GetContainerId(), HostID: m.GetHostId(), Size: m.GetLength()})
	}
	return maps
}

// owner are the ids that a file of the node has.
type owner struct{ uid, gid int }

// rootOf is the root of a pod's containers on the node: that of the pod's user
// namespace, or the node's.
func rootOf(pod *runtimeapi.PodSandboxConfig) owner {
	uid, gid := oci.HostUser(pod, specs.User{})
	return owner{uid, gid}
}

// makePrivate makes a directory that only the container's root can enter: below
// it are programs with the set-user-ID bit and whatever else an image may have,
// which must not act on the node for its users (CVE-2021-41103).
func makePrivate(dir string, root owner) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if err := os.Chown(dir, root.uid, root.gid); err != nil {
		return fmt.Errorf("give %s to the container's root: %w", dir, err)
	}
	return nil
}
