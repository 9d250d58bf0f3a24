package sandbox

import (
	"net/netip"
	"os"
	"path/filepath"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/oci"
)

// Details are what a person wants to know of a sandbox, beyond its facts.
type Details struct {
	NetnsPath   string
	NetnsClosed bool
	// RuntimeSpec is the config.json of pause, "null" when it is gone.
	RuntimeSpec []byte
}

// Details looks at the kernel and the files, now.
func (s *Store) Details(sb *Sandbox) Details {
	details := Details{RuntimeSpec: []byte("null")}
	if !sb.hostNetwork() {
		details.NetnsPath = s.options.Netns.Path(sb.ID)
		details.NetnsClosed = !s.options.Netns.Alive(sb.ID)
	}
	if spec, err := os.ReadFile(filepath.Join(s.Dir(sb.ID), "config.json")); err == nil {
		details.RuntimeSpec = spec
	}
	return details
}

// LiveAddresses are the addresses of the sandbox if the namespace that they
// are in is still there: one may have been removed by hand.
func (s *Store) LiveAddresses(sb *Sandbox) []netip.Addr {
	addresses := sb.Addresses()
	if len(addresses) == 0 || !s.options.Netns.Alive(sb.ID) {
		return nil
	}
	return addresses
}

// NetnsPath is where the sandbox's network namespace is pinned, "" for that of
// the node.
func (s *Store) NetnsPath(sb *Sandbox) string {
	if sb.hostNetwork() {
		return ""
	}
	return s.options.Netns.Path(sb.ID)
}

// UsernsPath is where the sandbox's user namespace is pinned, "" for that of
// the node.
func (s *Store) UsernsPath(sb *Sandbox) string {
	if oci.UserNamespace(sb.config) == nil {
		return ""
	}
	return s.options.Userns.Path(sb.ID)
}

// PodFiles are the host paths of what the containers of the sandbox share.
func (s *Store) PodFiles(sb *Sandbox) oci.PodFiles {
	dir := s.Dir(sb.ID)
	files := oci.PodFiles{
		Hosts: filepath.Join(dir, hostsFile), Hostname: filepath.Join(dir, hostnameFile), ResolvConf: filepath.Join(dir, resolvFile),
		Shm: filepath.Join(dir, shmDir),
	}
	if sb.config.GetLinux().GetSecurityContext().GetNamespaceOptions().GetIpc() == runtimeapi.NamespaceMode_NODE {
		files.Shm = "/dev/shm"
	}
	return files
}

// Hostname is what the containers of the sandbox find as their host's name. It is
// not read from their /etc/hostname, which they may write to.
func (s *Store) Hostname(sb *Sandbox) string {
	name, err := hostnameOf(sb.config)
	if err != nil {
		return sb.config.GetHostname()
	}
	return name
}
