package container

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	copying "github.com/containerd/continuity/fs"
	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/oci"
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

// fillVolumes makes the volumes and copies what the image has in their places
// into them, with owners, modes and all. The rootfs is mounted. A place that the
// image does not have is an empty volume of the container's user.
func fillVolumes(rootfs string, volumes []oci.Volume, user owner) error {
	for _, v := range volumes {
		if err := fillVolume(rootfs, v, user); err != nil {
			return fmt.Errorf("fill the image's volume %s: %w", v.ContainerPath, err)
		}
	}
	return nil
}

func fillVolume(rootfs string, v oci.Volume, user owner) error {
	if err := os.MkdirAll(v.HostPath, 0o755); err != nil {
		return err
	}
	if err := os.Chown(v.HostPath, user.uid, user.gid); err != nil {
		return err
	}
	source, err := inRootfs(rootfs, v.ContainerPath)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	info, err := os.Lstat(source)
	if err != nil {
		return err
	}
	if !info.IsDir() {
		return errors.New("it is not a directory in the image")
	}
	// A filesystem without extended attributes holds all the rest.
	if err := copying.CopyDir(v.HostPath, source, copying.WithAllowXAttrErrors()); err != nil {
		return err
	}
	return removeDevices(v.HostPath)
}

// removeDevices removes device nodes: in a volume they are on a filesystem of the
// node. A container gets its devices from its config.
func removeDevices(dir string) error {
	return filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.Type()&fs.ModeDevice != 0 {
			err = os.Remove(path)
		}
		return err
	})
}

// makeSources makes the directories that the container's mounts come from,
// where they are missing and no client makes them. It is idempotent; the
// directories stay when the container goes.
func makeSources(c *oci.Container) error {
	for _, m := range c.Config.GetMounts() {
		if m.GetImage() != nil {
			continue
		}
		if err := makeSource(m.GetHostPath(), c.Pod.GetMetadata().GetUid()); err != nil {
			return fmt.Errorf("the source of mount %s: %w", m.GetContainerPath(), err)
		}
	}
	return nil
}

// makeSource: the CRI wants an error for a host_path that is not there, but the
// kubelet leaves it to the runtime to make the directory of a hostPath volume
// without a type, so a missing one is made. Not made is what the kubelet has
// made itself, below its directory of the pod: a volume that has gone meanwhile
// must not become a directory of the node that is written to in its place. Nor
// is a directory made where only the kernel has files, or behind a symbolic
// link that leads nowhere.
func makeSource(path, podUID string) error {
	_, err := os.Stat(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if _, linkErr := os.Lstat(path); linkErr == nil {
		return fmt.Errorf("%s is a symbolic link to what is not there: %w", path, errdefs.ErrFailedPrecondition)
	}
	if podUID != "" && strings.Contains(filepath.Clean(path), "/pods/"+podUID+"/") || isOfTheKernel(path) {
		return fmt.Errorf("%s is not there: %w", path, errdefs.ErrFailedPrecondition)
	}
	return os.MkdirAll(path, 0o755)
}

func isOfTheKernel(path string) bool {
	path = filepath.Clean(path)
	for _, dir := range []string{"/dev/", "/proc/", "/sys/"} {
		if strings.HasPrefix(path, dir) && !strings.HasPrefix(path, "/dev/shm/") {
			return true
		}
	}
	return false
}

// makeLabels makes the SELinux labels of the container, with the level of its
// pod.
func (c *creation) makeLabels() (err error) {
	o := c.owner.options
	c.labels.Process, c.labels.Mount, err = o.Machine.NewLabels(oci.ContainerSELinux(c.config, o.Sandboxes.SELinux(c.sandbox)))
	return err
}

// relabel gives the sources of the mounts that ask for it the SELinux label of
// the container's files.
func relabel(c *oci.Container) error {
	sources, err := oci.Relabelled(c)
	if err != nil {
		return err
	}
	for _, source := range sources {
		if err := c.Machine.Relabel(source.HostPath, c.SELinux.Mount, c.SELinux.Shared()); err != nil {
			return fmt.Errorf("the source of mount %s: %w", source.ContainerPath, err)
		}
	}
	return nil
}

// awaitHostPaths waits until the sources of the mounts answer, whether they are
// there or not. On a mount whose server is gone that may be never, and nothing
// can end such a call, so it is left behind: one for each path, however often a
// container is asked for.
func (s *Store) awaitHostPaths(ctx context.Context, mounts []*runtimeapi.Mount) error {
	for _, mount := range mounts {
		if mount.GetHostPath() == "" {
			continue
		}
		if err := s.awaitHostPath(ctx, mount.GetContainerPath(), mount.GetHostPath()); err != nil {
			return err
		}
	}
	return nil
}

// awaitHostPath waits for one of them; mountPoint is where it is mounted.
func (s *Store) awaitHostPath(ctx context.Context, mountPoint, path string) error {
	answer := s.hostPaths.DoChan(path, func() (any, error) {
		_, _ = os.Stat(path) // its error is returned by the step that needs the path
		return nil, nil
	})
	select {
	case <-answer:
		return nil
	case <-ctx.Done():
		// The kind is that of the mount: the deadline is not the caller's.
		return fmt.Errorf("mount %s: %s on the node does not answer, it may be on a mount whose server is gone: %w: %v",
			mountPoint, path, errdefs.ErrUnavailable, context.Cause(ctx))
	}
}
