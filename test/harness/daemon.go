package harness

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const (
	readyTime = 2 * time.Minute // from start to an answer of Version
	stopTime  = time.Minute     // from SIGTERM to the exit
)

// Start starts the daemon, which must not run, and waits until it answers.
func (n *Node) Start() {
	n.t.Helper()
	if n.Running() {
		n.t.Fatalf("node %s: its daemon runs already", n.Network)
	}
	n.must("starting the daemon", n.start())
}

// TryStart is Start, but gives the error back: that of the daemon, if it ended.
func (n *Node) TryStart() error {
	n.t.Helper()
	if n.Running() {
		n.t.Fatalf("node %s: its daemon runs already", n.Network)
	}
	return n.start()
}

// RunDaemon runs a daemon with the node's flags and then these, in the node's
// network namespace, until it ends, and gives back what it wrote. It is for
// daemons that refuse to start.
func (n *Node) RunDaemon(flags ...string) (output string, err error) {
	cmd := n.command()
	cmd.Args = append(cmd.Args, flags...)
	err = n.inNetns(func() error {
		text, err := cmd.CombinedOutput()
		output = string(text)
		return err
	})
	return output, err
}

func (n *Node) start() error {
	err := n.inNetns(func() (err error) {
		n.daemon, err = startChild(n.command(), n.logFile())
		return err
	})
	if err != nil {
		return err
	}
	err = n.dial()
	if err == nil {
		err = n.waitReady()
	}
	if err != nil {
		return errors.Join(err, n.daemon.kill())
	}
	return nil
}

// Kill ends the daemon with SIGKILL. Its pods stay.
func (n *Node) Kill() {
	n.t.Helper()
	n.must("killing the daemon", n.daemon.kill())
}

// Stop ends the daemon with SIGTERM and fails the test unless it exits with
// code 0. Its pods stay.
func (n *Node) Stop() {
	n.t.Helper()
	n.must("stopping the daemon", n.stop())
}

func (n *Node) stop() error {
	ctx, cancel := context.WithTimeout(context.Background(), stopTime)
	defer cancel()
	return n.daemon.terminate(ctx)
}

// Restart is Stop, then Start.
func (n *Node) Restart() {
	n.t.Helper()
	n.Stop()
	n.Start()
}

// Running reports whether the daemon runs.
func (n *Node) Running() bool { return n.daemon != nil && n.daemon.running() }

// PID is the id of the daemon's process, or of the last one that ran.
func (n *Node) PID() int { return n.daemon.pid() }

// Log returns what the daemon, over all its starts, wrote to its standard
// error and output. The test's log gets its end when the test fails.
func (n *Node) Log() string {
	n.t.Helper()
	data, err := os.ReadFile(n.logFile())
	n.must("reading the daemon's log", ignoreMissing(err))
	return string(data)
}

func (n *Node) logFile() string { return filepath.Join(n.Dir, "daemon.log") }

// SetFlags adds arguments to the command line of the daemons that are started
// from now on; the last of a flag counts.
func (n *Node) SetFlags(flags ...string) { n.options.flags = append(n.options.flags, flags...) }

// Binaries is the directory of minicri and minicri-shim.
func (n *Node) Binaries() string { return n.binaries }

// SetBinaries makes another build of minicri and minicri-shim that of the daemons
// which are started from now on.
func (n *Node) SetBinaries(dir string) {
	n.t.Helper()
	n.useBinaries(dir)
}

// command is the daemon's. Flags given twice count the last time.
func (n *Node) command() *exec.Cmd {
	args := []string{
		"--config", n.configFile(),
		"--socket", n.Socket,
		"--root", n.Root,
		"--state", n.State,
		"--netns-dir", n.Netns,
		"--cni-conf-dir", n.CNIConf,
		"--cni-bin-dir", n.Plugins + ":" + n.CNIBin,
		"--shim", filepath.Join(n.binaries, "minicri-shim"),
	}
	if !n.options.levelOfFile {
		args = append(args, "--log-level", "debug")
	}
	cmd := exec.Command(filepath.Join(n.binaries, "minicri"), append(args, n.options.flags...)...)
	cmd.Env = append(os.Environ(), n.options.env...)
	return cmd
}

// dial makes a connection for each start: one that lost its daemon waits a
// second before it tries again.
func (n *Node) dial() error {
	n.hangUp()
	const largest = 16 << 20 // as the kubelet has it
	conn, err := grpc.NewClient("unix://"+n.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(largest)))
	if err != nil {
		return err
	}
	n.hangUp = func() { conn.Close() }
	n.Runtime = runtimeapi.NewRuntimeServiceClient(conn)
	n.Image = runtimeapi.NewImageServiceClient(conn)
	return nil
}

// waitReady asks for the version until the answer comes, the daemon ends or
// the time is over.
func (n *Node) waitReady() error {
	ctx, cancel := context.WithTimeout(context.Background(), readyTime)
	defer cancel()
	for {
		// A daemon that is killed leaves its socket behind: refused is not final.
		_, err := n.Runtime.Version(ctx, &runtimeapi.VersionRequest{})
		if err == nil {
			return nil
		}
		select {
		case <-n.daemon.done:
			return fmt.Errorf("it ended: %w", errors.Join(n.daemon.err, err))
		case <-ctx.Done():
			return fmt.Errorf("no answer within %v: %w", readyTime, err)
		case <-time.After(5 * time.Millisecond):
		}
		if err := n.dial(); err != nil {
			return err
		}
	}
}
