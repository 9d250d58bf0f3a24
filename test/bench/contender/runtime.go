package contender

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
)

// The names of the runtimes.
const (
	Minicri    = "minicri"
	Containerd = "containerd"
)

// Runtime is a runtime under test.
type Runtime struct {
	Name string
	// Start starts the daemon with nothing of the machine's but the program.
	// What it keeps is in dir.
	Start func(ctx context.Context, dir string) (*Process, error)
	// importImages brings in the images of a docker archive.
	importImages func(dir, archive string) []string
	// shim is the name of its shims' processes.
	shim string
}

// Programs are where the benchmark's programs are.
type Programs struct {
	Minicri string // the daemon to measure; minicri-shim is beside it
	CNI     string // the directory of plugins, for all runtimes
}

// BesideUs are the programs as make builds them in bin, seen from
// bin/bench/NAME.
func BesideUs() Programs {
	self, err := os.Executable()
	if err != nil {
		return Programs{Minicri: Minicri}
	}
	bin := filepath.Dir(filepath.Dir(self))
	return Programs{Minicri: filepath.Join(bin, "minicri"), CNI: filepath.Join(bin, "cni")}
}

const (
	socketName  = "cri.sock"
	networkName = "cni"
	// addressesName is where host-local keeps addresses.
	addressesName = "addresses"
	stateName     = "s" // the volatile directory; short: sockets are below it
)

// OfMinicri is minicri with further lines of configuration.
func OfMinicri(programs Programs, config string) Runtime {
	return Runtime{
		Name: Minicri,
		Start: func(ctx context.Context, dir string) (*Process, error) {
			return startMinicri(ctx, programs, dir, config)
		},
		importImages: func(dir, archive string) []string {
			return []string{programs.Minicri, "image", "--socket", filepath.Join(dir, socketName), "import", archive}
		},
		shim: "minicri-shim",
	}
}

func startMinicri(ctx context.Context, programs Programs, dir, config string) (*Process, error) {
	path := filepath.Join(dir, "config.toml")
	Check(os.WriteFile(path, []byte("cgroup_driver = \"cgroupfs\"\n"+config), 0o600))
	in := func(name string) string { return filepath.Join(dir, name) }
	return start(ctx, programs.Minicri, "--config", path, "--root", in("root"), "--state", in(stateName), "--socket", in(socketName),
		"--netns-dir", in("netns"), "--cni-conf-dir", in(networkName), "--cni-bin-dir", programs.CNI, "--log-level", "error")
}

// containerdConfig leaves the CRI plugin and what it needs.
const containerdConfig = `version = 2
root = %[1]q
state = %[2]q
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs", "io.containerd.tracing.processor.v1.otlp",
  "io.containerd.internal.v1.tracing"]
[grpc]
  address = %[3]q
[plugins."io.containerd.grpc.v1.cri"]
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  sandbox_image = %[6]q
  [plugins."io.containerd.grpc.v1.cri".cni]
    conf_dir = %[4]q
    bin_dir = %[5]q
`

// OfContainerd is the containerd in PATH, with further lines of configuration.
func OfContainerd(programs Programs, config string) Runtime {
	return Runtime{
		Name: Containerd,
		Start: func(ctx context.Context, dir string) (*Process, error) {
			return startContainerd(ctx, programs, dir, config)
		},
		importImages: func(dir, archive string) []string {
			return []string{"ctr", "--address", filepath.Join(dir, socketName), "--namespace", "k8s.io", "images", "import", archive}
		},
		shim: "containerd-shim",
	}
}

func startContainerd(ctx context.Context, programs Programs, dir, more string) (*Process, error) {
	in := func(name string) string { return filepath.Join(dir, name) }
	config := fmt.Sprintf(containerdConfig, in("root"), in(stateName), in(socketName), in(networkName), programs.CNI, pauseImage) + more
	Check(os.WriteFile(in("config.toml"), []byte(config), 0o600))
	return start(ctx, Containerd, "--config", in("config.toml"), "--log-level", "error")
}
