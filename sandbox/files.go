package sandbox

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/opencontainers/selinux/go-selinux/label"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/oci"
)

// The files that the containers of a pod share, in Sandboxes.Dir.
const (
	hostnameFile = "hostname"
	hostsFile    = "hosts"
	resolvFile   = "resolv.conf"
	shmDir       = "shm"
)

// makeFiles makes what the containers of the pod will find at their paths.
func (c *creation) makeFiles(context.Context) error {
	dir := c.owner.Dir(c.ID)
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return err
	}
	if err := c.makeLabels(); err != nil {
		return err
	}
	if logs := c.config.GetLogDirectory(); logs != "" {
		if err := os.MkdirAll(logs, 0o755); err != nil {
			return fmt.Errorf("make log_directory: %w", err)
		}
	}
	return errors.Join(
		writeHostname(filepath.Join(dir, hostnameFile), c.config),
		writeHosts(filepath.Join(dir, hostsFile)),
		writeResolvConf(filepath.Join(dir, resolvFile), c.config.GetDnsConfig()),
		c.makeShm(filepath.Join(dir, shmDir)),
	)
}

func writeHostname(path string, config *runtimeapi.PodSandboxConfig) error {
	name := config.GetHostname()
	if name == "" || oci.HostNetwork(config) {
		host, err := os.Hostname()
		if err != nil {
			return err
		}
		name = host
	}
	return os.WriteFile(path, []byte(name+"\n"), 0o644)
}

// writeHosts copies the node's /etc/hosts; the kubelet mounts its own over it.
func writeHosts(path string) error {
	hosts, err := os.ReadFile("/etc/hosts")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.WriteFile(path, hosts, 0o644)
}

// writeResolvConf writes what the CRI says, in its order; without a DNSConfig
// the pod resolves as the node does, with an empty one it does not resolve.
func writeResolvConf(path string, dns *runtimeapi.DNSConfig) error {
	if dns == nil {
		node, err := os.ReadFile("/etc/resolv.conf")
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return os.WriteFile(path, node, 0o644)
	}
	return os.WriteFile(path, resolvConf(dns), 0o644)
}

// resolvConf is in the form of resolv.conf(5).
func resolvConf(dns *runtimeapi.DNSConfig) []byte {
	var b bytes.Buffer
	if len(dns.GetSearches()) > 0 {
		fmt.Fprintln(&b, "search", strings.Join(dns.GetSearches(), " "))
	}
	for _, server := range dns.GetServers() {
		fmt.Fprintln(&b, "nameserver", server)
	}
	if len(dns.GetOptions()) > 0 {
		fmt.Fprintln(&b, "options", strings.Join(dns.GetOptions(), " "))
	}
	return b.Bytes()
}

// makeShm mounts the /dev/shm that the containers of the pod share. In the IPC
// namespace of the node they get the node's.
func (c *creation) makeShm(path string) error {
	if c.config.GetLinux().GetSecurityContext().GetNamespaceOptions().GetIpc() == runtimeapi.NamespaceMode_NODE {
		return nil
	}
	if err := os.MkdirAll(path, 0o700); err != nil {
		return err
	}
	options := fmt.Sprintf("mode=1777,size=%d", c.owner.options.ShmSize)
	if root, mapped := rootOf(oci.UserNamespace(c.config)); mapped {
		options += fmt.Sprintf(",uid=%d,gid=%d", root.uid, root.gid)
	}
	options = label.FormatMountLabel(options, c.labels.Mount)
	if err := unix.Mount("shm", path, "tmpfs", unix.MS_NOEXEC|unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		return fmt.Errorf("mount the pod's /dev/shm: %w", err)
	}
	return nil
}

type owner struct{ uid, gid uint32 }

// rootOf is who on the host is root in the pod's user namespace.
func rootOf(userns *runtimeapi.UserNamespace) (root owner, mapped bool) {
	uid, hasUID := hostID(userns.GetUids())
	gid, hasGID := hostID(userns.GetGids())
	return owner{uid, gid}, hasUID && hasGID
}

func hostID(mappings []*runtimeapi.IDMapping) (uint32, bool) {
	for _, m := range mappings {
		if m.GetContainerId() == 0 {
			return m.GetHostId(), true
		}
	}
	return 0, false
}

// removeFiles takes back what makeFiles made. The log directory belongs to the
// kubelet.
func (s *Store) removeFiles(id string) error {
	s.options.Machine.ReleaseLevel(s.labels(id).Process)
	return removeDir(s.Dir(id))
}

func removeDir(dir string) error {
	shm := filepath.Join(dir, shmDir)
	err := unix.Unmount(shm, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("unmount %s: %w", shm, err)
	}
	if err := state.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove the files of a sandbox: %w", err)
	}
	return nil
}
