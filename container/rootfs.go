package container

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/oci"
)

// longestRootfsFile bounds what is read of an image into memory.
const longestRootfsFile = 16 << 20

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
		return nil, errors.Join(fmt.Errorf("%s of the rootfs is not a file of at most %d bytes", name, longestRootfsFile), err)
	}
	file, err := os.Open(fdPath(place))
	if err != nil {
		return nil, fmt.Errorf("open %s of the rootfs: %w", name, err)
	}
	defer file.Close()
	return io.ReadAll(io.LimitReader(file, longestRootfsFile))
}

func readUsers(c *oci.Container) (err error) {
	if c.Passwd, err = readInRootfs(c.Rootfs, "etc/passwd"); err != nil {
		return err
	}
	c.Group, err = readInRootfs(c.Rootfs, "etc/group")
	return err
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
	images := c.owner.options.Images
	if err := images.Prepare(ctx, c.ID, c.ImageID, prepareOptions(c.sandbox.Config())); err != nil {
		return err
	}
	if err := makePrivate(c.owner.dir(c.ID), rootOf(c.sandbox.Config())); err != nil {
		return err
	}
	o := c.owner.options
	labels := oci.ContainerSELinux(c.config, o.Sandboxes.SELinux(c.sandbox)) // with the level of the pod
	if c.labels.Process, c.labels.Mount, err = o.Machine.NewLabels(labels); err != nil {
		return err
	}
	if err := images.Mount(ctx, c.ID, c.owner.rootfs(c.ID), c.labels.Mount); err != nil {
		return err
	}
	return c.mountImages(ctx)
}

// prepareOptions map the owners of files to the pod's user namespace.
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

type owner struct{ uid, gid int }

// rootOf is the node's ids of the root of the pod's user namespace.
func rootOf(pod *runtimeapi.PodSandboxConfig) owner {
	uid, gid := oci.HostUser(pod, specs.User{})
	return owner{uid, gid}
}

// makePrivate makes a directory that only the container's root can enter. An image may have set-user-ID
// programs and more, which must not act on the node for its users (CVE-2021-41103).
func makePrivate(dir string, root owner) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if err := os.Chown(dir, root.uid, root.gid); err != nil {
		return fmt.Errorf("change the owner of %s to the container's root: %w", dir, err)
	}
	return nil
}
