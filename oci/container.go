package oci

import (
	"cmp"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/machine"
)

// Container is what the spec of an application container is made from. Both
// configs have passed their checks (package validate), and the sources of the
// mounts are there.
type Container struct {
	ID, SandboxID string
	Pod           *runtimeapi.PodSandboxConfig
	Config        *runtimeapi.ContainerConfig
	Image         Image
	// Rootfs is where the container's root is mounted on the host.
	Rootfs string
	// Passwd and Group are what /etc/passwd and /etc/group in it say, empty
	// where there is none.
	Passwd, Group []byte
	// Hostname is what the container's UTS namespace has, the pod's or the
	// node's.
	Hostname   string
	Files      PodFiles
	Namespaces Namespaces
	// VolumesDir is a directory of this container for the volumes of its image
	// (see ImageVolumes).
	VolumesDir string
	// ImageMounts are the host directories of mounts of images, by
	// container_path, the image_sub_path already applied.
	ImageMounts map[string]string
	// CgroupsPath is where the container is accounted (see CgroupsPath).
	CgroupsPath string
	// PidsLimit is the most processes it may have, 0 for no limit.
	PidsLimit int64
	// SELinux are the labels that were made for it (see ContainerSELinux).
	SELinux SELinux
	// CDI knows the devices of vendors, nil where there are none.
	CDI     CDI
	Machine machine.Machine
	// Defaults are those of the node.
	Defaults Defaults
}

// CDI is what oci needs of a cdi.Cache.
type CDI interface {
	InjectDevices(spec *specs.Spec, devices ...string) (unknown []string, err error)
	GetErrors() map[string][]error
}

// Image is what an image's configuration says of the containers made from it
// (image-spec, config.md).
type Image struct {
	Entrypoint, Cmd, Env []string
	WorkingDir           string
	// User is a name or a uid, and perhaps a group after a colon.
	User    string
	Volumes []string
}

// PodFiles are the host paths of what the containers of a pod share.
type PodFiles struct {
	Hosts, Hostname, ResolvConf string
	// Shm is a mounted tmpfs, /dev/shm of the node in its IPC namespace.
	Shm string
}

// Namespaces are the paths of the namespaces that exist before the container:
// pinned ones, or below /proc/PID/ns of pause or of the target. A path is ""
// where the container lives in the node's.
type Namespaces struct{ Net, IPC, UTS, PID, User string }

type containerRule func(*Container, *specs.Spec) error

func containerRules() []containerRule {
	return []containerRule{
		containerProcess,
		containerEnv,
		containerRlimits,
		containerUser,
		containerCapabilities,
		containerNamespaces,
		containerMounts,
		containerHiddenPaths,
		containerResources,
		containerDevices,
		containerCDI,
		containerSeccomp,
		containerAppArmor,
		containerSELinux,
	}
}

// ForContainer makes the spec of an application container.
func ForContainer(c *Container) (*specs.Spec, error) {
	spec, err := c.newSpec()
	if err != nil {
		return nil, err
	}
	for _, rule := range containerRules() {
		if err := rule(c, spec); err != nil {
			return nil, err
		}
	}
	return spec, nil
}

// containerAnnotations are those by which tools know a container's spec.
func containerAnnotations(c *Container) map[string]string {
	pod, image := c.Pod.GetMetadata(), c.Config.GetImage()
	annotations := map[string]string{
		"io.kubernetes.cri.container-type":    "container",
		"io.kubernetes.cri.sandbox-id":        c.SandboxID,
		"io.kubernetes.cri.sandbox-name":      pod.GetName(),
		"io.kubernetes.cri.sandbox-namespace": pod.GetNamespace(),
		"io.kubernetes.cri.sandbox-uid":       pod.GetUid(),
		"io.kubernetes.cri.container-name":    c.Config.GetMetadata().GetName(),
		"io.kubernetes.cri.image-name":        cmp.Or(image.GetUserSpecifiedImage(), image.GetImage()),
	}
	if c.Defaults.OwnSandbox {
		delete(annotations, "io.kubernetes.cri.container-type")
	}
	return annotations
}

func (c *Container) security() *runtimeapi.LinuxContainerSecurityContext {
	return c.Config.GetLinux().GetSecurityContext()
}
