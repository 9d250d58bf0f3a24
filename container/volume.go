package container

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// ErrImageVolume marks errors of mounts that are images, which the kubelet
// counts apart.
var ErrImageVolume = errors.New("mount of an image")

// ImageMount is a mount of a container that shows an image, read-only (KEP
// 4639). The image's files stay as long as the container, whatever becomes of
// the image.
type ImageMount struct {
	// ContainerPath is where it is mounted, as the config says.
	ContainerPath string `json:"container_path"`
	ImageID       string `json:"image_id"`
}

// findImages finds the images that are mounted in a container.
func (s *Store) findImages(config *runtimeapi.ContainerConfig) (mounts []ImageMount, err error) {
	for _, m := range config.GetMounts() {
		if m.GetImage() == nil {
			continue
		}
		image, err := s.options.Images.Get(m.GetImage().GetImage())
		if err != nil {
			return nil, fmt.Errorf("%w: %s: %w", ErrImageVolume, m.GetContainerPath(), err)
		}
		mounts = append(mounts, ImageMount{ContainerPath: m.GetContainerPath(), ImageID: image.ID})
	}
	return mounts, nil
}

// Mounts are those of the config, images with the image_ref that was found: the
// same as PullImage answered, which the validation suite asks for.
func (c *Container) Mounts() []*runtimeapi.Mount {
	if len(c.ImageMounts) == 0 {
		return c.config.GetMounts()
	}
	refs := make(map[string]string)
	for _, m := range c.ImageMounts {
		refs[m.ContainerPath] = m.ImageID
	}
	var shown []*runtimeapi.Mount
	for _, m := range c.config.GetMounts() {
		if m.GetImage() != nil {
			m = proto.CloneOf(m)
			m.Image.ImageRef = refs[m.GetContainerPath()]
		}
		shown = append(shown, m)
	}
	return shown
}

// imagesDir has a directory for each image that is mounted in a container, by
// its number.
func (s *Store) imagesDir(id string) string { return filepath.Join(s.dir(id), "images") }

// imageKey names the snapshot of such an image.
func imageKey(id, number string) string { return id + "-image-" + number }

// mountImages mounts the images of a container's mounts on the node.
func (c *creation) mountImages(ctx context.Context) error {
	images := c.owner.options.Images
	options := prepareOptions(c.sandbox.Config())
	options.ReadOnly = true
	for i, m := range c.ImageMounts {
		number := strconv.Itoa(i)
		key := imageKey(c.ID, number)
		err := images.Prepare(ctx, key, m.ImageID, options)
		if err == nil {
			err = images.Mount(ctx, key, filepath.Join(c.owner.imagesDir(c.ID), number), c.labels.Mount)
		}
		if err != nil {
			return fmt.Errorf("%w: %s: %w", ErrImageVolume, m.ContainerPath, err)
		}
	}
	return nil
}

// imageSources are the directories of mounted images by container path, each
// with its image_sub_path.
func (c *creation) imageSources() (map[string]string, error) {
	subPaths := make(map[string]string)
	for _, m := range c.config.GetMounts() {
		subPaths[m.GetContainerPath()] = m.GetImageSubPath()
	}
	sources := make(map[string]string)
	for i, m := range c.ImageMounts {
		root := filepath.Join(c.owner.imagesDir(c.ID), strconv.Itoa(i))
		source, err := inRootfs(root, subPaths[m.ContainerPath])
		if err != nil {
			return nil, fmt.Errorf("%w: %s: image_sub_path %q: %w", ErrImageVolume, m.ContainerPath, subPaths[m.ContainerPath], err)
		}
		sources[m.ContainerPath] = source
	}
	return sources, nil
}

// numbers are those of a container's mounted images.
func (c *Container) numbers() (all []string) {
	for i := range c.ImageMounts {
		all = append(all, strconv.Itoa(i))
	}
	return all
}

// removeImages unmounts images of a container, by their numbers.
func (s *Store) removeImages(ctx context.Context, id string, numbers []string) error {
	var errs []error
	for _, number := range numbers {
		errs = append(errs,
			s.options.Images.Unmount(filepath.Join(s.imagesDir(id), number)),
			s.options.Images.RemoveSnapshot(ctx, imageKey(id, number)))
	}
	return errors.Join(errs...)
}

// volumes has the volumes that a container's image declares. They are the
// container's own, as large as its writable layer, and so not in memory.
func (s *Store) volumes(id string) string {
	return filepath.Join(s.options.Root, "container-volumes", id)
}
