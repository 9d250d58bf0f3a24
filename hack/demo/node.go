package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/test/leak"
)

// The network of the demo exists only in its namespace.
const (
	demoNetwork = "minicri-demo"
	demoBridge  = "demo0"
	demoSubnet  = "10.244.0.0/24"
)

// demoNode is a node for the demo: a daemon with its own directories, network
// and cgroup.
type demoNode struct {
	dir        string
	binaries   string
	config     *config.Config
	daemon     *exec.Cmd
	connection *grpc.ClientConn
	client     runtimeapi.RuntimeServiceClient
}

func newDemoNode() (*demoNode, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "mcd") // short: there are sockets in it, unix(7)
	if err != nil {
		return nil, err
	}
	n := &demoNode{dir: dir, binaries: filepath.Dir(self), config: config.Default()}
	c := n.config
	c.Socket = n.socket()
	c.Root, c.State, c.NetnsDir = n.path("root"), n.path("state"), n.path("netns")
	c.CNIConf = n.path("net.d")
	if plugins := filepath.Join(n.binaries, "cni"); exists(plugins) {
		c.CNIBin = plugins
	}
	c.CgroupDriver, c.CgroupParent = "cgroupfs", "/"+filepath.Base(dir)
	c.DefaultNetwork = config.DefaultNetwork{
		Enabled: true, Masquerade: true, Name: demoNetwork, Bridge: demoBridge, Subnet: demoSubnet, DataDir: n.path("addresses"),
	}
	return n, nil
}

func (n *demoNode) path(name string) string { return filepath.Join(n.dir, name) }
func (n *demoNode) socket() string          { return n.path("minicri.sock") }
func (n *demoNode) logFile() string         { return n.path("daemon.log") }
func (n *demoNode) minicri() string         { return filepath.Join(n.binaries, "minicri") }
func (n *demoNode) hasDaemon() bool         { return n.daemon != nil && n.daemon.ProcessState == nil }

// sharedMounts are the directories that the daemon makes shared mounts of; they
// stay when it ends.
func (n *demoNode) sharedMounts() []string {
	return []string{"netns", filepath.Join("state", "userns")}
}

// leakKinds are the kinds of leftovers that the demo prints.
func (n *demoNode) leakKinds() []leak.Kind {
	return []leak.Kind{leak.NetnsFile, leak.Namespace, leak.Mount, leak.Link, leak.Rule, leak.Address, leak.Result, leak.Cgroup, leak.Process}
}

func exists(path string) bool { _, err := os.Stat(path); return err == nil }

func (n *demoNode) metadata(name string) *runtimeapi.PodSandboxMetadata {
	return &runtimeapi.PodSandboxMetadata{Name: name, Namespace: "demo", Uid: "uid-" + name}
}

// scope is where leftovers are looked for: everything in these namespaces.
func (n *demoNode) scope() leak.Scope {
	return leak.Scope{
		NetnsDirs:   []string{n.config.NetnsDir},
		Namespaces:  []string{"net", "user", "ipc", "uts", "pid", "mnt"},
		Mounts:      []string{"/"},
		Links:       true,
		Rules:       true,
		AddressDirs: []string{filepath.Join(n.path("addresses"), demoNetwork)},
		ResultDirs:  []string{"/var/lib/cni/results"},
		Networks:    []string{demoNetwork},
		Cgroups:     []string{n.config.CgroupParent},
		Ancestors:   []int{os.Getpid()},
	}
}

// start starts the daemon and waits until it answers.
func (n *demoNode) start(ctx context.Context) error {
	file := n.path("config.toml")
	written, err := os.Create(file)
	if err != nil {
		return err
	}
	if err := errors.Join(n.config.Write(written), written.Close()); err != nil {
		return err
	}
	log, err := os.OpenFile(n.logFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	n.daemon = exec.Command(n.minicri(), "--config", file)
	n.daemon.Stderr = log
	if err := n.daemon.Start(); err != nil {
		return err
	}
	return n.connect(ctx)
}

func (n *demoNode) connect(ctx context.Context) error {
	if n.connection == nil {
		connection, err := grpc.NewClient("unix://"+n.socket(), grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: time.Second}))
		if err != nil {
			return err
		}
		n.connection, n.client = connection, runtimeapi.NewRuntimeServiceClient(connection)
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute) // a loaded machine may be slow
	defer cancel()
	for {
		n.connection.ResetConnectBackoff()
		_, err := n.client.Version(ctx, &runtimeapi.VersionRequest{})
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the daemon does not answer: %w", err)
		case <-time.After(2 * time.Millisecond):
		}
	}
}

func (n *demoNode) stop() error {
	if err := n.daemon.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	return n.daemon.Wait()
}

func (n *demoNode) runPod(ctx context.Context, name string) (*runtimeapi.PodSandboxStatus, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	response, err := n.client.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: &runtimeapi.PodSandboxConfig{
		Metadata:     n.metadata(name),
		Hostname:     name,
		LogDirectory: n.path("logs/" + name),
		Linux: &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
			Seccomp: &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault},
		}},
	}})
	if err != nil {
		return nil, err
	}
	return n.podStatus(ctx, response.GetPodSandboxId())
}

func (n *demoNode) podStatus(ctx context.Context, id string) (*runtimeapi.PodSandboxStatus, error) {
	response, err := n.client.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id})
	return response.GetStatus(), err
}

// podInfo is the part of the verbose status that the demo shows.
type podInfo struct {
	NetNamespace string `json:"netNamespace"`
	Timeline     []struct {
		Step string `json:"step"`
		Took string `json:"took"`
	} `json:"timeline"`
}

func (n *demoNode) info(ctx context.Context, id string) (podInfo, error) {
	var info podInfo
	response, err := n.client.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id, Verbose: true})
	if err != nil {
		return info, err
	}
	return info, json.Unmarshal([]byte(response.GetInfo()["info"]), &info)
}

func (n *demoNode) timeline(ctx context.Context, id string) (string, error) {
	info, err := n.info(ctx, id)
	var parts []string
	for _, step := range info.Timeline {
		took, _ := time.ParseDuration(step.Took) // none for one that took none
		parts = append(parts, fmt.Sprintf("%s %s", step.Step, short(took)))
	}
	return strings.Join(parts, ", "), err
}

// netns is the path of a pod's network namespace, from its verbose status.
func (n *demoNode) netns(id string) string {
	info, err := n.info(context.Background(), id)
	if err != nil {
		return ""
	}
	return info.NetNamespace
}

// removeNetwork removes the objects of the node: the bridge,
// the parent cgroup, and the daemon's shared mounts.
func (n *demoNode) removeNetwork() error {
	var errs []error
	if bridge, err := netlink.LinkByName(demoBridge); err == nil {
		errs = append(errs, netlink.LinkDel(bridge))
	}
	hierarchies, err := cgroup.FindHierarchies()
	if err == nil {
		err = hierarchies.Remove(n.config.CgroupParent, time.Second)
	}
	for _, directory := range n.sharedMounts() {
		if err := unix.Unmount(n.path(directory), 0); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, err)
		}
	}
	return errors.Join(append(errs, err)...)
}

// removePods removes the pods that are there after a step that failed.
func (n *demoNode) removePods() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	pods, err := n.client.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
	errs := []error{err}
	for _, pod := range pods.GetItems() {
		_, stopErr := n.client.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: pod.GetId()})
		_, removeErr := n.client.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: pod.GetId()})
		errs = append(errs, stopErr, removeErr)
	}
	return errors.Join(errs...)
}

func (n *demoNode) remove() error {
	var errs []error
	if n.connection != nil && n.hasDaemon() {
		errs = append(errs, n.removePods())
	}
	if n.connection != nil {
		errs = append(errs, n.connection.Close())
	}
	if n.hasDaemon() {
		errs = append(errs, n.stop())
	}
	return errors.Join(append(errs, n.removeNetwork(), os.RemoveAll(n.dir))...)
}

// lastLog is the end of the daemon's log.
func (n *demoNode) lastLog() string {
	const most = 4096
	log, err := os.ReadFile(n.logFile())
	if err != nil {
		return ""
	}
	return "the daemon's log ends:\n" + string(log[max(0, len(log)-most):])
}
