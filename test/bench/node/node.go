// Package node runs minicri for the benchmarks: a daemon with directories, a
// network and a cgroup of its own, in the namespaces of the caller. A Node has
// one owner, who closes it; it holds no state besides the daemon.
package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/test/bench/contender"
)

// Network is the name of the node's network, and Bridge that of its bridge.
const (
	Network = "bench"
	Bridge  = "bench0"
)

// Node is a running daemon and a client of it.
type Node struct {
	Dir        string
	Config     *config.Config
	Client     runtimeapi.RuntimeServiceClient
	daemon     *exec.Cmd
	connection *grpc.ClientConn
}

// Start starts the daemon of the binaries' directory and waits until it serves.
func Start(ctx context.Context, binaries string) (*Node, error) {
	return StartWith(ctx, binaries, func(*config.Config) {})
}

// StartWith is Start with a changed configuration.
func StartWith(ctx context.Context, binaries string, change func(*config.Config)) (*Node, error) {
	dir := contender.Must(os.MkdirTemp("", "mb"))
	n := &Node{Dir: dir, Config: config.Default()}
	if err := contender.Catch(func() error { return n.configure(binaries, change) }); err != nil {
		return nil, errors.Join(err, n.Close())
	}
	if err := contender.Catch(func() error { return n.start(ctx, filepath.Join(binaries, "minicri")) }); err != nil {
		log, _ := os.ReadFile(n.path("log"))
		return nil, errors.Join(fmt.Errorf("%w\n%s", err, log), n.Close())
	}
	return n, nil
}

func (n *Node) path(name string) string { return filepath.Join(n.Dir, name) }

func (n *Node) configure(binaries string, change func(*config.Config)) error {
	c := n.Config
	c.Socket, c.Root, c.State = n.path("sock"), n.path("root"), n.path("state")
	c.NetnsDir, c.CNIConf, c.CNIBin = n.path("netns"), n.path("net.d"), filepath.Join(binaries, "cni")
	c.CgroupDriver, c.CgroupParent = "cgroupfs", "/"+filepath.Base(n.Dir)
	change(c)
	contender.Check(os.Mkdir(c.CNIConf, 0o755))
	contender.Check(os.WriteFile(filepath.Join(c.CNIConf, "10-bench.conflist"), n.ConfList(), 0o644))
	file := contender.Must(os.Create(n.path("config.toml")))
	return errors.Join(c.Write(file), file.Close())
}

// ConfList is the network configuration that the daemon and the floor use.
func (n *Node) ConfList() []byte {
	return contender.ConfList(Network, Bridge, "10.243.0.0/16", n.path("addresses"))
}

func (n *Node) start(ctx context.Context, program string) error {
	log := contender.Must(os.Create(n.path("log")))
	defer log.Close()
	n.daemon = exec.Command(program, "--config", n.path("config.toml"))
	n.daemon.Stderr = log
	// A signal to our group is not for the daemon: Close needs it.
	n.daemon.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	contender.Check(n.daemon.Start())
	n.connection = contender.Must(grpc.NewClient("unix://"+n.Config.Socket, grpc.WithTransportCredentials(insecure.NewCredentials())))
	n.Client = runtimeapi.NewRuntimeServiceClient(n.connection)
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for {
		status, err := n.Client.Status(ctx, &runtimeapi.StatusRequest{})
		if err == nil && status.GetStatus().GetConditions()[1].GetStatus() {
			return nil
		}
		if ctx.Err() != nil {
			return fmt.Errorf("the daemon is not ready: %w", errors.Join(err, ctx.Err()))
		}
		n.connection.ResetConnectBackoff()
		time.Sleep(5 * time.Millisecond)
	}
}

// PID is the daemon's.
func (n *Node) PID() int { return n.daemon.Process.Pid }

// Pod is the config of a pod with the name.
func (n *Node) Pod(name string, network runtimeapi.NamespaceMode) *runtimeapi.PodSandboxConfig {
	return contender.PodConfig(name, n.path("logs/"+name), network)
}

// removePods removes what a benchmark that was ended early has left.
func (n *Node) removePods() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	pods, err := n.Client.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
	errs := []error{err}
	for _, pod := range pods.GetItems() {
		_, err := n.Client.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: pod.Id})
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Close stops the daemon and removes what belongs to the node.
func (n *Node) Close() error {
	var errs []error
	if n.connection != nil {
		errs = append(errs, n.removePods(), n.connection.Close())
	}
	if n.daemon != nil && n.daemon.Process != nil {
		errs = append(errs, n.daemon.Process.Signal(syscall.SIGTERM), n.daemon.Wait())
	}
	for _, directory := range []string{"netns", "state/userns"} {
		_ = unix.Unmount(n.path(directory), unix.MNT_DETACH)
	}
	if hierarchies, err := cgroup.FindHierarchies(); err == nil {
		errs = append(errs, hierarchies.Remove(n.Config.CgroupParent, time.Second))
	}
	return errors.Join(append(errs, os.RemoveAll(n.Dir))...)
}
