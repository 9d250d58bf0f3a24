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

	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/selinux/go-selinux/label"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/object"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/oci"
)

// The containers of a pod share these files. They are in Store.Dir, a small tmpfs: a container
// that writes to them cannot fill the node, and the kernel charges the pod. Those of /etc are in a directory named by
// the sandbox's id: OpenTelemetry's detectors read an id of 64 digits from the mountinfo line of /etc/hostname.
const (
	hostnameFile = "hostname"
	hostsFile    = "hosts"
	resolvFile   = "resolv.conf"
	shmDir       = "shm"
)

// makeFiles makes what the containers of the pod share.
func (c *creation) makeFiles(ctx context.Context) (err error) {
	// Stop or undo releases the level of the labels.
	c.labels.Process, c.labels.Mount, err = c.owner.options.Machine.NewLabels(oci.SandboxSELinux(c.config))
	if err != nil {
		return err
	}
	if logs := c.config.GetLogDirectory(); logs != "" {
		_, err := object.Await(ctx, &c.owner.logDirs, logs, func() (string, error) { return "", os.MkdirAll(logs, 0o755) })
		if err != nil {
			return fmt.Errorf("make log_directory: %w", err)
		}
	}
	dir := c.owner.Dir(c.ID)
	if err := writeFiles(c.owner.options.Kernel, dir, c.ID, c.config); err != nil {
		return err
	}
	return c.makeShm(filepath.Join(dir, shmDir))
}

func writeFiles(kernel Kernel, dir, id string, config *runtimeapi.PodSandboxConfig) error {
	hostname, nameErr := hostnameOf(config)
	hostname += "\n"
	hosts, hostsErr := readIfThere("/etc/hosts") // the kubelet mounts its own over it
	resolv, resolvErr := resolvConf(config.GetDnsConfig())
	if err := errors.Join(nameErr, hostsErr, resolvErr); err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return err
	}
	const growth = 256 << 10 // of the files, pause's config.json included
	const inodes = 1024      // two fifos for each container, and some files
	options := fmt.Sprintf("mode=0711,nr_inodes=%d,size=%d", inodes, growth+len(hostname)+len(hosts)+len(resolv))
	if err := kernel.MountTmpfs("pod", dir, options); err != nil {
		return fmt.Errorf("mount a tmpfs for the pod's files: %w", err)
	}
	etc := filepath.Join(dir, id)
	if err := os.Mkdir(etc, 0o711); err != nil {
		return err
	}
	uid, gid := oci.HostUser(config, specs.User{}) // root of the pod
	for name, content := range map[string][]byte{hostnameFile: []byte(hostname), hostsFile: hosts, resolvFile: resolv} {
		path := filepath.Join(etc, name)
		if err := errors.Join(os.WriteFile(path, content, 0o644), kernel.Chown(path, uid, gid)); err != nil {
			return err
		}
	}
	return nil
}

// hostnameOf returns the node's name for a pod without a name or a network of its own.
func hostnameOf(config *runtimeapi.PodSandboxConfig) (string, error) {
	if name := config.GetHostname(); name != "" && !oci.HostNetwork(config) {
		return name, nil
	}
	return os.Hostname()
}

func readIfThere(path string) ([]byte, error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return data, err
}

// resolvConf returns a resolv.conf(5): the node's for nil. An empty config resolves nothing. The API server accepts any
// text as an option: it stays on its line.
func resolvConf(dns *runtimeapi.DNSConfig) ([]byte, error) {
	if dns == nil {
		return readIfThere("/etc/resolv.conf")
	}
	var b bytes.Buffer
	line := func(keyword string, values ...string) {
		if words := strings.Fields(strings.Join(values, " ")); len(words) > 0 {
			fmt.Fprintln(&b, keyword, strings.Join(words, " "))
		}
	}
	line("search", dns.GetSearches()...)
	for _, server := range dns.GetServers() {
		line("nameserver", server)
	}
	line("options", dns.GetOptions()...)
	return b.Bytes(), nil
}

// makeShm mounts the pod's /dev/shm, unless the pod has the node's IPC namespace.
func (c *creation) makeShm(path string) error {
	if c.config.GetLinux().GetSecurityContext().GetNamespaceOptions().GetIpc() == runtimeapi.NamespaceMode_NODE {
		return nil
	}
	if err := os.MkdirAll(path, 0o700); err != nil {
		return err
	}
	options := fmt.Sprintf("mode=1777,size=%d", c.owner.options.ShmSize)
	if oci.UserNamespace(c.config) != nil {
		uid, gid := oci.HostUser(c.config, specs.User{}) // root of the pod
		options += fmt.Sprintf(",uid=%d,gid=%d", uid, gid)
	}
	options = label.FormatMountLabel(options, c.labels.Mount)
	if err := c.owner.options.Kernel.MountTmpfs("shm", path, options); err != nil {
		return fmt.Errorf("mount the pod's /dev/shm: %w", err)
	}
	return nil
}

// removeFiles removes what makeFiles made, but the log directory, which is the kubelet's.
func (s *Store) removeFiles(id string) error {
	if err := s.unmountFiles(id); err != nil {
		return err
	}
	if err := state.RemoveAll(s.Dir(id)); err != nil {
		return fmt.Errorf("remove the files of a sandbox: %w", err)
	}
	return nil
}

// unmountFiles releases the memory of the shared files, and the SELinux level that pause's config.json names.
func (s *Store) unmountFiles(id string) error {
	s.options.Machine.ReleaseLevel(s.SELinux(id).Process)
	var errs []error
	for _, path := range []string{filepath.Join(s.Dir(id), shmDir), s.Dir(id)} {
		err := s.options.Kernel.Unmount(path)
		if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
