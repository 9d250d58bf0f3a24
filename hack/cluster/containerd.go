package main

import (
	"fmt"
	"os"
	"path/filepath"
)

// containerdConfiguration is for containerd 1.6, as Debian has it. Its network is
// what minicri bundles.
const containerdConfiguration = `version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "%s"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/opt/cni/bin"
    conf_dir = "/etc/cni/net.d"
    conf_template = "/etc/containerd/network.json"
`

const containerdNetwork = `{"cniVersion": "1.0.0", "name": "minicri", "plugins": [
  {"type": "bridge", "bridge": "minicri0", "isGateway": true, "ipMasq": false, "hairpinMode": true,
   "ipam": {"type": "host-local", "ranges": [[{"subnet": "{{.PodCIDR}}"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
  {"type": "portmap", "capabilities": {"portMappings": true}, "snat": true}
]}
`

// installContainerd puts Debian's containerd and runc, which make bench-deps
// unpacks, on the node's disk.
func (n *node) installContainerd(binaries, pause string) error {
	for _, name := range []string{"bin/containerd", "bin/containerd-shim-runc-v2", "bin/ctr", "sbin/runc"} {
		from := filepath.Join(binaries, "debian/usr", name)
		if !exists(from) {
			from = filepath.Join(binaries, "debian/usr/bin", filepath.Base(name))
		}
		if err := install(from, n.path("bin/"+filepath.Base(name))); err != nil {
			return fmt.Errorf("%w; run make bench-deps", err)
		}
	}
	files := map[string]string{
		"etc-containerd/config.toml":  fmt.Sprintf(containerdConfiguration, pause),
		"etc-containerd/network.json": containerdNetwork,
	}
	for name, content := range files {
		if err := os.WriteFile(n.path(name), []byte(content), 0o644); err != nil {
			return err
		}
	}
	return nil
}
