package container

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/object"
	"github.com/minicri/minicri/oci"
)

// longestRootfsFile bounds what is read of an image into memory. Images have some KiB of users and groups; a file of
// this size can name 100,000 groups of one user, which take 30 MiB while they are parsed.
const longestRootfsFile = 1 << 20

// readInRootfs reads a file as a process in the rootfs would find it; a missing one is empty. It never
// opens a pipe or a device: that alone arms a watchdog, or rewinds a tape.
func readInRootfs(rootfs, name string) ([]byte, error) {
	place, err := openInRootfs(rootfs, name, unix.O_PATH)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open %s of the rootfs: %w", name, err)
	}
	defer place.Close()
	if info, err := place.Stat(); err != nil || !info.Mode().IsRegular() || info.Size() > longestRootfsFile {
		return nil, errors.Join(fmt.Errorf("%s of the image is not a file of at most %d bytes: %w",
			name, longestRootfsFile, errdefs.ErrInvalidArgument), err)
	}
	file, err := os.Open(fdPath(place))
	if err != nil {
		return nil, fmt.Errorf("open %s of the rootfs: %w", name, err)
	}
	defer file.Close()
	return io.ReadAll(io.LimitReader(file, longestRootfsFile))
}

// inRootfs resolves a path in a rootfs, as a process in it would, to a path on the node without
// symbolic links; fs.ErrNotExist if there is none. An empty path is the root.
func inRootfs(rootfs, name string) (string, error) {
	file, err := openInRootfs(rootfs, path.Join("/", name), unix.O_PATH)
	if err != nil {
		return "", err
	}
	defer file.Close()
	return os.Readlink(fdPath(file))
}

// fdPath leads to an open file, wherever it is now (proc_pid_fd(5)).
func fdPath(file *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", file.Fd()) }

// openInRootfs has the kernel keep the path in the rootfs (openat2(2)), even if it changes meanwhile.
func openInRootfs(rootfs, name string, flags uint64) (*os.File, error) {
	root, err := unix.Open(rootfs, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(root)
	for {
		fd, err := unix.Openat2(root, name, &unix.OpenHow{
			Flags:   flags | unix.O_CLOEXEC,
			Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
		})
		// EAGAIN: something was renamed meanwhile, the kernel cannot be sure.
		if err == nil {
			return os.NewFile(uintptr(fd), name), nil
		} else if !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) {
			return nil, err
		}
	}
}

func (c *creation) makeRootfs(ctx context.Context) (err error) {
	if err := c.owner.makePrivate(c.owner.dir(c.ID), onNode(c.sandbox.Config(), specs.User{})); err != nil {
		return err
	}
	o := c.owner.options
	labels := oci.ContainerSELinux(c.config, o.Sandboxes.SELinux(c.SandboxID)) // with the level of the pod
	if c.labels.Process, c.labels.Mount, err = o.Machine.NewLabels(labels); err != nil {
		return err
	}
	options := prepareOptions(c.sandbox.Config())
	if err := c.mountImage(ctx, c.ID, c.ImageID, c.owner.rootfs(c.ID), options); err != nil {
		return err
	}
	options.ReadOnly = true
	for i, m := range c.ImageMounts {
		if err := c.mountImage(ctx, imageKey(c.ID, i), m.ImageID, c.owner.imageDir(c.ID, i), options); err != nil {
			return fmt.Errorf("%w: %s: %w", ErrImageVolume, m.ContainerPath, err)
		}
	}
	return nil
}

// mountImage mounts a snapshot of an image, by a key, at target.
func (c *creation) mountImage(ctx context.Context, key, imageID, target string, options image.PrepareOptions) error {
	images := c.owner.options.Images
	if err := images.Prepare(ctx, key, imageID, options); err != nil {
		return err
	}
	return images.Mount(ctx, key, target, c.labels.Mount)
}

// prepareOptions map the owners of files to the pod's user namespace.
func prepareOptions(pod *runtimeapi.PodSandboxConfig) image.PrepareOptions {
	userns := oci.UserNamespace(pod)
	return image.PrepareOptions{UIDs: oci.IDMappings(userns.GetUids()), GIDs: oci.IDMappings(userns.GetGids())}
}

type ids struct{ uid, gid int }

// onNode returns the ids that a user of the pod has on the node. The zero user is its root.
func onNode(pod *runtimeapi.PodSandboxConfig, user specs.User) ids {
	uid, gid := oci.HostUser(pod, user)
	return ids{uid, gid}
}

// makePrivate makes a directory that only the container's root can enter. An image may have set-user-ID
// programs and more, which must not act on the node for its users (CVE-2021-41103).
func (s *Store) makePrivate(dir string, root ids) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if err := s.options.Kernel.Chown(dir, root.uid, root.gid); err != nil {
		return fmt.Errorf("change the owner of %s to the container's root: %w", dir, err)
	}
	return nil
}

// ErrImageVolume marks errors of image mounts, which the kubelet counts apart.
var ErrImageVolume = errors.New("mount of an image")

// ImageMount is a read-only mount of an image (KEP 4639). The container keeps the files of a removed image.
type ImageMount struct {
	ContainerPath string `json:"container_path"` // as the config says
	ImageID       string `json:"image_id"`
}

// findImages finds the images that a container mounts.
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

// Mounts are those of the config, images with the image_ref that PullImage answered, as critest expects.
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

// imageDir is where the image of a mount, by its number, is mounted on the node.
func (s *Store) imageDir(id string, number int) string {
	return filepath.Join(s.dir(id), "images", strconv.Itoa(number))
}

// imageKey names the snapshot of an image mount.
func imageKey(id string, number int) string { return fmt.Sprint(id, "-image-", number) }

// imageSources maps container paths to directories of mounted images, each with its image_sub_path.
func (c *creation) imageSources() (map[string]string, error) {
	sources, number := make(map[string]string), 0
	for _, m := range c.config.GetMounts() {
		if m.GetImage() == nil {
			continue
		}
		source, err := inRootfs(c.owner.imageDir(c.ID, number), m.GetImageSubPath())
		if err != nil {
			return nil, fmt.Errorf("%w: %s: image_sub_path %q: %w", ErrImageVolume, m.GetContainerPath(), m.GetImageSubPath(), err)
		}
		sources[m.GetContainerPath()] = source
		number++ // two may have one path
	}
	return sources, nil
}

// volumes is the directory of a container's image volumes. They may be large, so they are not in memory.
func (s *Store) volumes(id string) string {
	return filepath.Join(s.options.Root, "container-volumes", id)
}

func (c *creation) fillVolumes(ctx context.Context) error {
	if len(c.plan.Volumes) == 0 {
		return nil
	}
	if err := c.owner.makePrivate(c.parts.VolumesDir, onNode(c.parts.Pod, specs.User{})); err != nil {
		return err
	}
	for _, v := range c.plan.Volumes {
		if err := c.owner.fillVolume(ctx, c.parts.Rootfs, v, onNode(c.parts.Pod, c.plan.Spec.Process.User)); err != nil {
			return fmt.Errorf("fill the image's volume %s: %w", v.ContainerPath, err)
		}
	}
	return nil
}

// fillVolume makes a volume from what the image has in its place, owners and modes included, or an empty one
// of the container's user.
func (s *Store) fillVolume(ctx context.Context, rootfs string, v oci.Volume, user ids) error {
	if err := os.MkdirAll(v.HostPath, 0o755); err != nil {
		return err
	}
	if err := s.options.Kernel.Chown(v.HostPath, user.uid, user.gid); err != nil {
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
	return copyTree(ctx, v.HostPath, source)
}

// makeSources makes missing sources of mounts, and collects what the plan is made from.
func (c *creation) makeSources(ctx context.Context) error {
	resolved, err := c.owner.resolveSources(ctx, c.config.GetMounts(), c.sandbox.Config().GetMetadata().GetUid())
	if err != nil {
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
		VolumesDir: c.owner.volumes(c.ID), ImageMounts: images, Resolved: resolved,
		CgroupsPath: c.CgroupsPath, PidsLimit: o.PidsLimit, Machine: o.Machine, Defaults: c.owner.defaultsOf(c.sandbox), SELinux: c.labels,
	}
	return nil
}

// makePlan reads the users of the image and plans. One creation at a time does so: see longestRootfsFile.
func (c *creation) makePlan(ctx context.Context) (err error) {
	if err := c.owner.users.Acquire(ctx, 1); err != nil {
		return context.Cause(ctx)
	}
	defer c.owner.users.Release(1)
	defer func() { c.parts.Passwd, c.parts.Group = nil, nil }()
	if c.parts.Passwd, err = readInRootfs(c.parts.Rootfs, "etc/passwd"); err != nil {
		return err
	}
	if c.parts.Group, err = readInRootfs(c.parts.Rootfs, "etc/group"); err != nil {
		return err
	}
	c.plan, err = oci.ForContainer(c.parts)
	return err
}

// resolveSources makes missing sources of mounts, which outlive the container, and returns each source with its symbolic
// links resolved.
func (s *Store) resolveSources(ctx context.Context, mounts []*runtimeapi.Mount, podUID string) (resolved map[string]string, err error) {
	resolved = make(map[string]string)
	for _, m := range mounts {
		path := m.GetHostPath()
		if m.GetImage() != nil || path == "" {
			continue
		}
		if resolved[path], err = s.source(ctx, path, podUID); err != nil {
			return nil, fmt.Errorf("make the source of mount %s: %w", m.GetContainerPath(), err)
		}
	}
	return resolved, nil
}

// source makes and resolves one source. Any access to it may hang, even after others did not: relabel has the only other.
func (s *Store) source(ctx context.Context, path, podUID string) (string, error) {
	return object.Await(ctx, &s.hostPaths, path, func() (string, error) {
		if err := makeSource(path, podUID); err != nil {
			return "", err
		}
		return filepath.EvalSymlinks(path)
	})
}

// makeSource makes a missing directory. The CRI wants an error, but the kubelet relies on the runtime
// for a hostPath volume without a type. It makes nothing below the kubelet's directory of the pod, where
// a missing volume has gone, in the kernel's filesystems, or behind a dangling symbolic link.
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
