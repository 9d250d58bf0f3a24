package container

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	copying "github.com/containerd/continuity/fs"
	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/object"
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
func (c *Container) Mounts() (shown []*runtimeapi.Mount) {
	images := 0
	for _, m := range c.config.GetMounts() {
		if m.GetImage() != nil {
			m = proto.CloneOf(m)
			m.Image.ImageRef = c.ImageMounts[images].ImageID
			images++
		}
		shown = append(shown, m)
	}
	return shown
}

// imageDir is where an image is mounted on the node for a container, by its number.
func (s *Store) imageDir(id string, number int) string {
	return filepath.Join(s.dir(id), "images", strconv.Itoa(number))
}

// imageKey names the snapshot of such an image.
func imageKey(id string, number int) string { return fmt.Sprint(id, "-image-", number) }

// mountImages mounts the images of a container's mounts on the node.
func (c *creation) mountImages(ctx context.Context) error {
	images := c.owner.options.Images
	options := prepareOptions(c.sandbox.Config())
	options.ReadOnly = true
	for i, m := range c.ImageMounts {
		err := images.Prepare(ctx, imageKey(c.ID, i), m.ImageID, options)
		if err == nil {
			err = images.Mount(ctx, imageKey(c.ID, i), c.owner.imageDir(c.ID, i), c.labels.Mount)
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
	sources := make(map[string]string)
	for _, m := range c.config.GetMounts() {
		if m.GetImage() == nil {
			continue
		}
		source, err := inRootfs(c.owner.imageDir(c.ID, len(sources)), m.GetImageSubPath())
		if err != nil {
			return nil, fmt.Errorf("%w: %s: image_sub_path %q: %w", ErrImageVolume, m.GetContainerPath(), m.GetImageSubPath(), err)
		}
		sources[m.GetContainerPath()] = source
	}
	return sources, nil
}

// volumes has the volumes that a container's image declares. They are the
// container's own, as large as its writable layer, and so not in memory.
func (s *Store) volumes(id string) string {
	return filepath.Join(s.options.Root, "container-volumes", id)
}

// fillVolume makes a volume with what the image has in its place, owners and modes
// included, or an empty one of the container's user. Device nodes are removed: on a
// filesystem of the node they would work.
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
	return filepath.WalkDir(v.HostPath, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.Type()&fs.ModeDevice != 0 {
			err = os.Remove(path)
		}
		return err
	})
}

// makeSources makes the directories that the container's mounts come from, where they are
// missing. They stay when the container goes.
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

// makeSource makes a missing directory, although the CRI wants an error: the kubelet leaves
// it to the runtime to make that of a hostPath volume without a type. It does not make what
// is below the kubelet's directory of the pod, where a volume has gone meanwhile, nor where
// only the kernel has files, nor behind a symbolic link that leads nowhere.
func makeSource(path, podUID string) error {
	_, err := os.Stat(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if _, linkErr := os.Lstat(path); linkErr == nil {
		return fmt.Errorf("%s is a symbolic link to what is not there: %w", path, errdefs.ErrFailedPrecondition)
	}
	clean := filepath.Clean(path)
	ofTheKernel := slices.ContainsFunc([]string{"/dev/", "/proc/", "/sys/"}, func(dir string) bool { return strings.HasPrefix(clean, dir) })
	if ofTheKernel && !strings.HasPrefix(clean, "/dev/shm/") || podUID != "" && strings.Contains(clean, "/pods/"+podUID+"/") {
		return fmt.Errorf("%s is not there: %w", path, errdefs.ErrFailedPrecondition)
	}
	return os.MkdirAll(path, 0o755)
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
// there or not.
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
	err := object.Await(ctx, &s.hostPaths, path, func() error {
		_, _ = os.Stat(path) // its error is returned by the step that needs the path
		return nil
	})
	if err != nil {
		return fmt.Errorf("mount %s: %w", mountPoint, err)
	}
	return nil
}
