package contender

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
)

// Node is a runtime that serves pods.
type Node struct {
	Runtime
	*Process
	CRI        runtimeapi.RuntimeServiceClient
	dir        string
	number     int
	handler    string
	embedded   bool // its network is minicri's own
	connection *grpc.ClientConn
}

func startNodes(ctx context.Context, dir string, in setting) (nodes []*Node, err error) {
	archive := filepath.Join(dir, "images.tar")
	Check(writeImages(archive))
	programs := BesideUs()
	config := in.engine.minicri()
	if in.embedded {
		config += embeddedNetwork(filepath.Join(dir, "0", addressesName))
	}
	for i, runtime := range []Runtime{OfMinicri(programs, config), OfContainerd(programs, in.engine.containerd())} {
		n := &Node{
			Runtime: runtime, dir: filepath.Join(dir, strconv.Itoa(i)), number: i, handler: in.engine.Name,
			embedded: in.embedded && runtime.Name == Minicri,
		}
		nodes = append(nodes, n)
		if err := Catch(func() error { return n.start(ctx, archive) }); err != nil {
			return nodes, fmt.Errorf("%s: %w", runtime.Name, err)
		}
	}
	return nodes, nil
}

func closeNodes(nodes []*Node) (err error) {
	for _, n := range nodes {
		if closeErr := n.close(); closeErr != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", n.Name, closeErr))
		}
	}
	return err
}

func (n *Node) start(ctx context.Context, archive string) error {
	Check(n.prepare())
	n.Process = Must(n.Runtime.Start(ctx, n.dir))
	n.connection = Must(Connect(ctx, n.dir))
	n.CRI = runtimeapi.NewRuntimeServiceClient(n.connection)
	command := n.importImages(n.dir, archive)
	if out, err := exec.CommandContext(ctx, command[0], command[1:]...).CombinedOutput(); err != nil {
		return fmt.Errorf("%v: %w: %s", command, err, out)
	}
	return until(ctx, func() error { return n.ready(ctx) })
}

// prepare makes the directory, with a network and file systems in memory: for logs, so
// that no disk is measured, and for the volatile directory, which is below /run on a
// node.
func (n *Node) prepare() error {
	network := filepath.Join(n.dir, networkName)
	Check(os.MkdirAll(network, 0o755))
	if !n.embedded {
		conf := ConfList("bench", fmt.Sprintf("bench%d", n.number), fmt.Sprintf("10.%d.0.0/16", 200+n.number), filepath.Join(n.dir, addressesName))
		Check(os.WriteFile(filepath.Join(network, "10-bench.conflist"), conf, 0o644))
	}
	for _, directory := range []string{n.logs(), filepath.Join(n.dir, stateName)} {
		Check(os.Mkdir(directory, 0o755))
		if err := unix.Mount("tmpfs", directory, "tmpfs", 0, "mode=0755"); err != nil {
			return fmt.Errorf("mount a tmpfs at %s: %w", directory, err)
		}
	}
	return nil
}

func (n *Node) logs() string { return filepath.Join(n.dir, "logs") }

// ready reports whether the network and the images are there.
func (n *Node) ready(ctx context.Context) error {
	answer, err := n.CRI.Status(ctx, &runtimeapi.StatusRequest{})
	if err != nil {
		return err
	}
	for _, condition := range answer.GetStatus().GetConditions() {
		if !condition.GetStatus() && condition.GetType() != "ContainerdHasNoDeprecationWarnings" {
			return fmt.Errorf("%s: %s", condition.GetType(), condition.GetMessage())
		}
	}
	for _, image := range []string{Image, pauseImage} {
		request := &runtimeapi.ImageStatusRequest{Image: &runtimeapi.ImageSpec{Image: image}}
		answer, err := runtimeapi.NewImageServiceClient(n.connection).ImageStatus(ctx, request)
		if err != nil {
			return err
		}
		if answer.GetImage() == nil {
			return fmt.Errorf("image %s is not there", image)
		}
	}
	return nil
}

// cgroupParent is the cgroup of all the node's pods.
func (n *Node) cgroupParent() string {
	return "/" + filepath.Base(filepath.Dir(n.dir)) + "-" + n.Name
}

// close ends the pods and the daemon and removes what belongs to the node.
func (n *Node) close() error {
	var errs []error
	if n.CRI != nil {
		errs = append(errs, n.removePods(), n.connection.Close())
	}
	if n.Process != nil {
		if n.Stop(); errors.Join(errs...) != nil {
			fmt.Fprintf(os.Stderr, "%s said:\n%s\n", n.Name, n.Output)
		}
	}
	if hierarchies, err := cgroup.FindHierarchies(); err == nil {
		errs = append(errs, hierarchies.Remove(n.cgroupParent(), 10*time.Second))
	}
	return errors.Join(append(errs, UnmountBelow(n.dir), os.RemoveAll(n.dir))...)
}

// removePods has a time of its own: it is for a benchmark that was ended, too.
func (n *Node) removePods() error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	pods, err := n.CRI.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
	if err != nil {
		return err
	}
	return Parallel(len(pods.GetItems()), func(i int) error { return n.RemovePod(ctx, pods.GetItems()[i].GetId()) })
}

// UnmountBelow takes away the mounts that a daemon leaves for the next one.
func UnmountBelow(dir string) error {
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
	for _, m := range slices.Backward(mounts) { // those inside of others first
		err = errors.Join(err, unix.Unmount(m.Mountpoint, unix.MNT_DETACH))
	}
	return err
}
