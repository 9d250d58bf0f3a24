package contender

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/oci/pause"
	"github.com/minicri/minicri/test/hostile/registry"
)

// The names of the runtimes.
const (
	Minicri    = "minicri"
	Containerd = "containerd"
)

// Runtime is one that can be started, with further lines of configuration. The number tells
// its network from that of the one beside it; it may be the embedded one of minicri.
type Runtime struct {
	Name, Config string
	Number       int
	embedded     bool
}

// Node is a runtime that was started, which serves pods. Its owner closes it.
type Node struct {
	Runtime
	CRI     runtimeapi.RuntimeServiceClient
	Images  runtimeapi.ImageServiceClient
	Dir     string
	Handler string
	// HostPort is the first of the host ports of pods in networks of their own, one for each; 0 for none.
	HostPort   int32
	command    *exec.Cmd
	output     bytes.Buffer // to be read when the process has ended
	connection *grpc.ClientConn
}

// patience is how long a runtime may take to be ready.
const patience = 20 * time.Second

// Start starts a runtime, with nothing of the machine's but the program, in a directory,
// and waits until its network is ready.
func Start(ctx context.Context, dir string, r Runtime) *Node {
	n := &Node{Runtime: r, Dir: dir}
	if err := Catch(func() { n.start(ctx) }); err != nil {
		err = errors.Join(err, n.Close())
		Check(fmt.Errorf("%s: %w: %s", n.Name, err, n.output.Bytes()))
	}
	return n
}

func (n *Node) start(ctx context.Context) {
	n.prepare()
	line := n.commandLine()
	n.command = exec.Command(line[0], line[1:]...)
	n.command.Stdout, n.command.Stderr = &n.output, &n.output
	// A signal to our group is not for the daemon: Close needs it.
	n.command.SysProcAttr = &unix.SysProcAttr{Setpgid: true}
	Check(n.command.Start())
	n.connection = Must(grpc.NewClient("unix://"+n.Path("cri.sock"), grpc.WithTransportCredentials(insecure.NewCredentials())))
	n.CRI, n.Images = runtimeapi.NewRuntimeServiceClient(n.connection), runtimeapi.NewImageServiceClient(n.connection)
	n.until(ctx, func() error { return n.ready(ctx) })
}

// Path is that of something of the node's.
func (n *Node) Path(name string) string { return filepath.Join(n.Dir, name) }

// Bin is a file that make builds, seen from bin/bench/NAME.
func Bin(name string) string {
	return filepath.Join(filepath.Dir(filepath.Dir(Must(os.Executable()))), name)
}

// prepare makes the directory, with a network and file systems in memory: for logs, so that
// no disk is measured, and for the volatile directory, which is below /run on a node.
func (n *Node) prepare() {
	Check(os.MkdirAll(n.Path("cni"), 0o755))
	if !n.embedded {
		Check(os.WriteFile(n.Path("cni/10-bench.conflist"), n.ConfList(), 0o644))
	}
	for _, directory := range []string{n.Path("logs"), n.Path("s")} {
		Check(os.Mkdir(directory, 0o755))
		Check(unix.Mount("tmpfs", directory, "tmpfs", 0, "mode=0755"))
	}
}

// ConfList is the network of the node's pods: a bridge with addresses that are kept in its directory.
func (n *Node) ConfList() []byte {
	return fmt.Appendf(nil, `{
  "cniVersion": "1.0.0", "name": "bench",
  "plugins": [
    {"type": "bridge", "bridge": "bench%d", "isGateway": true, "ipMasq": true, "hairpinMode": true,
     "ipam": {"type": "host-local", "dataDir": %q, "ranges": [[{"subnet": "10.%d.0.0/16"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
    {"type": "portmap", "capabilities": {"portMappings": true}, "snat": true}
  ]
}`, n.Number, n.Path("addresses"), 200+n.Number)
}

// containerdConfig leaves the CRI plugin and what it needs.
const containerdConfig = `version = 2
root = "%[1]s/root"
state = "%[1]s/s"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs", "io.containerd.tracing.processor.v1.otlp",
  "io.containerd.internal.v1.tracing"]
[grpc]
  address = "%[1]s/cri.sock"
[plugins."io.containerd.grpc.v1.cri"]
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  sandbox_image = %[3]q
  [plugins."io.containerd.grpc.v1.cri".cni]
    conf_dir = "%[1]s/cni"
    bin_dir = %[2]q
`

// commandLine writes the configuration, and is what starts the daemon.
func (n *Node) commandLine() []string {
	file := n.Path("config.toml")
	if n.Name == Containerd {
		Check(os.WriteFile(file, []byte(fmt.Sprintf(containerdConfig, n.Dir, Bin("cni"), pauseImage)+n.Config), 0o600))
		return []string{Containerd, "--config", file, "--log-level", "error"}
	}
	config := fmt.Sprintf("cgroup_driver = \"cgroupfs\"\ncgroup_parent = %q\ncontainerd_socket = %q\n", n.CgroupParent(),
		n.Path("containerd.sock")) + n.Config
	if n.embedded {
		const network = "[default_network]\nenabled = true\nbridge = 'bench0'\nsubnet = '10.200.0.0/16'\ndata_dir = %q\n"
		config += fmt.Sprintf(network, n.Path("addresses"))
	}
	Check(os.WriteFile(file, []byte(config), 0o600))
	return []string{
		Bin(Minicri), "--config", file, "--root", n.Path("root"), "--state", n.Path("s"), "--socket", n.Path("cri.sock"),
		"--netns-dir", n.Path("netns"), "--cni-conf-dir", n.Path("cni"), "--cni-bin-dir", Bin("cni"), "--log-level", "error",
	}
}

// engineConfig is the configuration of both runtimes for containers that are run by a
// program in PATH. The default runtime of containerd, runc, is none where another table is given.
func engineConfig(name string) (minicri, containerd string) {
	const table = `  [plugins."io.containerd.grpc.v1.cri".containerd]
    default_runtime_name = %[1]q
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.%[1]s]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.%[1]s.options]
      BinaryName = %[2]q
`
	if name == "" {
		return "", ""
	}
	path := Must(exec.LookPath(name))
	return fmt.Sprintf("[runtimes.%s]\ntype = \"oci\"\npath = %q\n", name, path), fmt.Sprintf(table, name, path)
}

// importImages brings in the images of a docker archive.
func (n *Node) importImages(ctx context.Context, archive string) {
	line := []string{Bin(Minicri), "image", "--socket", n.Path("cri.sock"), "import", archive}
	if n.Name == Containerd {
		line = []string{"ctr", "--address", n.Path("cri.sock"), "--namespace", "k8s.io", "images", "import", archive}
	}
	if out, err := exec.CommandContext(ctx, line[0], line[1:]...).CombinedOutput(); err != nil {
		Check(fmt.Errorf("%v: %w: %s", line, err, out))
	}
	for _, image := range []string{Image, pauseImage} {
		n.until(ctx, func() error {
			answer, err := n.Images.ImageStatus(ctx, &runtimeapi.ImageStatusRequest{Image: &runtimeapi.ImageSpec{Image: image}})
			if err == nil && answer.GetImage() == nil {
				err = fmt.Errorf("image %s is not there", image)
			}
			return err
		})
	}
}

// until tries again until there is no error.
func (n *Node) until(ctx context.Context, try func() error) {
	for began := time.Now(); ; time.Sleep(2 * time.Millisecond) {
		err := try()
		if err == nil {
			return
		}
		if ctx.Err() != nil || time.Since(began) > patience {
			Check(errors.Join(err, ctx.Err()))
		}
		n.connection.ResetConnectBackoff() // gRPC's pause after a failure is a second
	}
}

func (n *Node) ready(ctx context.Context) error {
	answer, err := n.CRI.Status(ctx, &runtimeapi.StatusRequest{})
	for _, condition := range answer.GetStatus().GetConditions() {
		if !condition.GetStatus() && condition.GetType() != "ContainerdHasNoDeprecationWarnings" {
			return fmt.Errorf("%s: %s", condition.GetType(), condition.GetMessage())
		}
	}
	return err
}

// CgroupParent is the cgroup of all the node's pods.
func (n *Node) CgroupParent() string {
	return "/" + strings.ReplaceAll(strings.TrimPrefix(n.Dir, "/"), "/", "-") + "-" + n.Name
}

// Close ends the pods and the daemon and removes what belongs to the node.
func (n *Node) Close() error {
	var errs []error
	if n.connection != nil {
		errs = append(errs, Catch(n.removePods), n.connection.Close())
	}
	if n.command != nil && n.command.Process != nil {
		_ = n.command.Process.Signal(os.Interrupt)
		late := time.AfterFunc(10*time.Second, func() { _ = n.command.Process.Kill() })
		_ = n.command.Wait()
		late.Stop()
		if errors.Join(errs...) != nil {
			fmt.Fprintf(os.Stderr, "%s said:\n%s\n", n.Name, n.output.Bytes())
		}
	}
	if hierarchies, err := cgroup.FindHierarchies(); err == nil {
		errs = append(errs, hierarchies.Remove(n.CgroupParent(), 10*time.Second))
	}
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(n.Dir))
	for _, m := range slices.Backward(mounts) { // those inside of others first
		errs = append(errs, unix.Unmount(m.Mountpoint, unix.MNT_DETACH))
	}
	return errors.Join(append(errs, err, os.RemoveAll(n.Dir))...)
}

// removePods has a time of its own: it is for a benchmark that was ended, too.
func (n *Node) removePods() {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	pods := Must(n.CRI.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})).GetItems()
	Parallel(len(pods), func(i int) { n.RemovePod(ctx, pods[i].GetId()) })
}

const (
	// Image is what containers of benchmarks are made from: busybox and App.
	Image = "bench.example/app:1"
	// pauseImage is minicri's own pause program, for runtimes that want an image.
	pauseImage = "bench.example/pause:1"
	// App is a program that sleeps, and ends at SIGTERM.
	App = "/app"

	busybox = "/bin/busybox" // Debian's busybox-static
)

// writeImages writes an archive of both images, as docker save does.
func writeImages(path string) {
	program := Must(pause.Binary())
	box, err := os.ReadFile(busybox)
	if err != nil {
		Check(fmt.Errorf("%w: run make setup", err))
	}
	app := []registry.Entry{registry.File(App[1:], 0o755, string(program)), registry.File("bin/busybox", 0o755, string(box))}
	for _, dir := range []string{"bin", "dev", "etc", "proc", "sys", "tmp"} {
		app = append(app, registry.Dir(dir, 0o755, 0))
	}
	for _, applet := range []string{"sh", "true"} {
		app = append(app, registry.Entry{Header: tar.Header{Typeflag: tar.TypeSymlink, Name: "bin/" + applet, Linkname: "busybox"}})
	}
	Check(tarball.MultiWriteToFile(path, map[name.Tag]v1.Image{
		Must(name.NewTag(Image)):      imageOf(v1.Config{Entrypoint: []string{App}, Env: []string{"PATH=/bin"}}, layerOf(app...)),
		Must(name.NewTag(pauseImage)): imageOf(v1.Config{Entrypoint: []string{"/pause"}}, layerOf(registry.File("pause", 0o755, string(program)))),
	}))
}

// imageOf is an image for this machine.
func imageOf(config v1.Config, layers ...v1.Layer) v1.Image {
	img := Must(mutate.AppendLayers(empty.Image, layers...))
	file := Must(img.ConfigFile()).DeepCopy()
	file.OS, file.Architecture, file.Config = "linux", runtime.GOARCH, config
	return Must(mutate.ConfigFile(img, file))
}

// layerOf is a layer of these entries.
func layerOf(entries ...registry.Entry) v1.Layer {
	data := registry.Layer(entries...)
	return Must(tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil },
		tarball.WithCompressionLevel(gzip.DefaultCompression)))
}

// Pod is a pod of a node.
type Pod struct {
	ID   string
	Node *Node
	// Seccomp is the filter of system calls of the containers that are made from now on.
	Seccomp runtimeapi.SecurityProfile_ProfileType
	config  *runtimeapi.PodSandboxConfig
}

// RunPod runs a pod such as the kubelet sends, in a network of its own.
func (n *Node) RunPod(ctx context.Context, name string) *Pod {
	return n.runPod(ctx, name, name, runtimeapi.NamespaceMode_POD)
}

// RunHostPod runs one in the network of the node, which takes no plugin.
func (n *Node) RunHostPod(ctx context.Context, name string) *Pod {
	return n.runPod(ctx, name, "", runtimeapi.NamespaceMode_NODE) // it has the node's hostname
}

func (n *Node) runPod(ctx context.Context, name, hostname string, network runtimeapi.NamespaceMode) *Pod {
	logs := n.Path("logs/" + name)
	Check(os.MkdirAll(logs, 0o755))
	p := &Pod{Node: n, config: &runtimeapi.PodSandboxConfig{
		Metadata:     &runtimeapi.PodSandboxMetadata{Name: name, Namespace: "bench", Uid: name},
		Hostname:     hostname,
		LogDirectory: logs,
		DnsConfig:    &runtimeapi.DNSConfig{Servers: []string{"10.96.0.10"}},
		Linux: &runtimeapi.LinuxPodSandboxConfig{
			CgroupParent: n.CgroupParent(),
			SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
				NamespaceOptions: &runtimeapi.NamespaceOption{Network: network, Pid: runtimeapi.NamespaceMode_CONTAINER},
				Seccomp:          &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault},
			},
		},
	}}
	p.Seccomp = runtimeapi.SecurityProfile_Unconfined
	if n.HostPort > 0 && network == runtimeapi.NamespaceMode_POD {
		port := atomic.AddInt32(&n.HostPort, 1)
		p.config.PortMappings = []*runtimeapi.PortMapping{{HostPort: port, ContainerPort: 80}}
	}
	answer, err := n.CRI.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: p.config, RuntimeHandler: n.Handler})
	n.check("run pod "+name, err)
	p.ID = answer.GetPodSandboxId()
	return p
}

func (n *Node) check(what string, err error) {
	if err != nil {
		Check(fmt.Errorf("%s: %s: %w", n.Name, what, err))
	}
}

// StopPod stops a pod.
func (n *Node) StopPod(ctx context.Context, id string) {
	_, err := n.CRI.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: id})
	n.check("stop pod", err)
}

// RemovePod stops and removes a pod with its containers.
func (n *Node) RemovePod(ctx context.Context, id string) {
	n.StopPod(ctx, id)
	_, err := n.CRI.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id})
	n.check("remove pod", err)
}

// Run creates a container that runs App, starts it, and returns its id.
func (p *Pod) Run(ctx context.Context, name string) (id string) {
	config := &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: name},
		Image:    &runtimeapi.ImageSpec{Image: Image},
		Command:  []string{App},
		LogPath:  name + ".log",
		Linux: &runtimeapi.LinuxContainerConfig{
			Resources: &runtimeapi.LinuxContainerResources{CpuShares: 102, OomScoreAdj: 1000, MemoryLimitInBytes: 1 << 30},
			// As a kubelet sends them: without, a container shares the pids of its pod.
			SecurityContext: &runtimeapi.LinuxContainerSecurityContext{
				NamespaceOptions: p.config.GetLinux().GetSecurityContext().GetNamespaceOptions(),
				Seccomp:          &runtimeapi.SecurityProfile{ProfileType: p.Seccomp},
			},
		},
	}
	answer, err := p.Node.CRI.CreateContainer(ctx, &runtimeapi.CreateContainerRequest{PodSandboxId: p.ID, Config: config, SandboxConfig: p.config})
	p.Node.check("create container "+name, err)
	_, err = p.Node.CRI.StartContainer(ctx, &runtimeapi.StartContainerRequest{ContainerId: answer.GetContainerId()})
	p.Node.check("start container "+name, err)
	return answer.GetContainerId()
}
