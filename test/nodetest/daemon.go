package nodetest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/test/harness"
)

// child is a process that the test started. A goroutine waits for it, so it never stays as a zombie.
type child struct {
	cmd  *exec.Cmd
	done chan struct{} // closed when the process has ended
	err  error         // of its end, valid after done
}

// startChild starts a process on the calling thread, whose namespaces it gets. It writes to the end of the log file.
func startChild(cmd *exec.Cmd, log string) (*child, error) {
	file, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	cmd.Stdout, cmd.Stderr = file, file
	// A group of its own: Ctrl-C is for the test, which then takes down in order.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	c := &child{cmd: cmd, done: make(chan struct{})}
	go func() {
		c.err = cmd.Wait()
		close(c.done)
	}()
	return c, nil
}

func (c *child) pid() int { return c.cmd.Process.Pid }

func (c *child) running() bool {
	select {
	case <-c.done:
		return false
	default:
		return true
	}
}

// dump ends a process of Go that hangs, after it has written down its goroutines. One that does not even do
// that hangs in the kernel: the error says where.
func (c *child) dump() error {
	if err := c.cmd.Process.Signal(syscall.SIGQUIT); err == nil {
		select {
		case <-c.done:
			return nil
		case <-time.After(settleTime):
		}
	}
	return errors.Join(fmt.Errorf("its threads are in the kernel at%s", kernelStacks(c.pid())), c.kill())
}

// kernelStacks are the stacks of a process's threads in the kernel, as proc_pid_stack(5) has them.
func kernelStacks(pid int) string {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stack", pid)) // a good pattern
	var all strings.Builder
	for _, file := range files {
		stack, err := os.ReadFile(file)
		if err != nil {
			stack = []byte(err.Error())
		}
		fmt.Fprintf(&all, "\n%s:\n%s", file, stack)
	}
	return all.String()
}

// kill ends the process with SIGKILL, unless it has ended.
func (c *child) kill() error {
	err := c.cmd.Process.Kill()
	if errors.Is(err, os.ErrProcessDone) {
		err = nil
	}
	<-c.done
	return err
}

// terminate ends the process with SIGTERM. It has to exit with code 0 before ctx ends.
func (c *child) terminate(ctx context.Context) error {
	if err := c.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		<-c.done // the only reason why it cannot be told
		return fmt.Errorf("it ended before SIGTERM: %w", errors.Join(err, c.err))
	}
	select {
	case <-c.done:
	case <-ctx.Done():
		return errors.Join(errors.New("still runs after SIGTERM, its log ends with its goroutines"), c.dump())
	}
	if c.err != nil {
		return fmt.Errorf("want exit code 0 after SIGTERM: %w", c.err)
	}
	return nil
}

// Start starts the daemon, which must not run unless it is doomed, and waits until it answers.
func (n *Node) Start() { n.must("starting the daemon", n.TryStart()) }

// TryStart is Start, but gives the error back: that of the daemon, if it ended.
func (n *Node) TryStart() error {
	n.t.Helper()
	harness.Need(n.t, !n.Running() || process.Doomed(n.PID()), "node %s: its daemon runs already", n.Network)
	return n.start()
}

// RunDaemon runs a daemon with the node's flags and then these, in the node's network namespace, until it
// ends, and gives back what it wrote. It is for daemons that refuse to start.
func (n *Node) RunDaemon(flags ...string) (output string, err error) {
	cmd := n.command()
	cmd.Args = append(cmd.Args, flags...)
	return n.runToEnd(cmd.CombinedOutput)
}

// RunCommand runs another command of the program, such as "check", with the node's flags and then these, and
// gives back what it wrote to its output.
func (n *Node) RunCommand(name string, flags ...string) (output string, err error) {
	cmd := n.command()
	cmd.Args = append([]string{cmd.Args[0], name}, append(cmd.Args[1:], flags...)...)
	return n.runToEnd(cmd.Output)
}

func (n *Node) runToEnd(run func() ([]byte, error)) (output string, err error) {
	err = n.inNetns(func() error {
		text, err := run()
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
	if err = n.dial(); err == nil {
		err = n.waitReady()
	}
	if err != nil {
		return errors.Join(err, n.daemon.kill())
	}
	return nil
}

// Kill ends the daemon with SIGKILL. Its pods stay.
func (n *Node) Kill() { n.must("killing the daemon", n.daemon.kill()) }

// Stop ends the daemon with SIGTERM and fails the test unless it exits with code 0. Its pods stay.
func (n *Node) Stop() { n.must("stopping the daemon", n.stop()) }

func (n *Node) stop() error {
	return n.daemon.terminate(harness.Limited(n.t))
}

// Restart is Stop, then Start.
func (n *Node) Restart() {
	n.Stop()
	n.Start()
}

// Crash is Kill, then Start.
func (n *Node) Crash() {
	n.Kill()
	n.Start()
}

// Reload changes the configuration, one key that can be reloaded at least, and waits until it is in force. A daemon
// that has read a change at SIGHUP reads the files once more, a second or two later: that line may come at any moment.
func (n *Node) Reload(change func()) {
	applied := regexp.MustCompile(`configuration reloaded.* applied="?\[[^\]]`)
	lines := func() int { return len(applied.FindAllString(n.Log(), -1)) }
	before := lines()
	change()
	n.must("asking for a reload", syscall.Kill(n.PID(), syscall.SIGHUP))
	harness.Eventually(n.t, "the configuration is reloaded", func() bool { return lines() > before })
}

// Running reports whether the daemon runs.
func (n *Node) Running() bool { return n.daemon != nil && n.daemon.running() }

// PID is the id of the daemon's process, or of the last one that ran.
func (n *Node) PID() int { return n.daemon.pid() }

// Log returns what the daemon, over all its starts, wrote to its standard error and output. The test's log
// gets its end when the test fails.
func (n *Node) Log() string {
	data, err := os.ReadFile(n.logFile())
	n.must("reading the daemon's log", harness.IgnoreMissing(err))
	return string(data)
}

func (n *Node) logFile() string { return filepath.Join(n.Dir, "daemon.log") }

// SetFlags adds arguments to the command line of the daemons that are started from now on; the last of a flag counts.
func (n *Node) SetFlags(flags ...string) { n.options.flags = append(n.options.flags, flags...) }

// Binaries is the directory of minicri and minicri-shim.
func (n *Node) Binaries() string { return n.binaries }

// command is the daemon's. Flags given twice count the last time.
func (n *Node) command() *exec.Cmd {
	args := []string{
		"--config", n.configFile(), "--socket", n.Socket, "--root", n.Root, "--state", n.State, "--netns-dir", n.Netns,
		"--cni-conf-dir", n.CNIConf, "--cni-bin-dir", n.Plugins + ":" + n.CNIBin, "--shim", filepath.Join(n.binaries, "minicri-shim"),
	}
	if !n.options.levelOfFile {
		args = append(args, "--log-level", "debug")
	}
	cmd := exec.Command(filepath.Join(n.binaries, "minicri"), append(args, n.options.flags...)...)
	cmd.Env = append(os.Environ(), n.options.env...)
	return cmd
}

// dial makes a connection for each start: one that lost its daemon waits a second before it tries again.
func (n *Node) dial() error {
	n.hangUp()
	const largest = 16 << 20 // as the kubelet has it
	conn, err := grpc.NewClient("unix://"+n.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(largest)))
	if err != nil {
		return err
	}
	n.hangUp = func() { conn.Close() }
	n.Runtime, n.Image = runtimeapi.NewRuntimeServiceClient(conn), runtimeapi.NewImageServiceClient(conn)
	return nil
}

// waitReady asks for the version until the answer comes, the daemon ends or the time is over.
func (n *Node) waitReady() error {
	ctx := harness.Limited(n.t)
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
			return fmt.Errorf("no answer: %w", err)
		case <-time.After(5 * time.Millisecond):
		}
		if err := n.dial(); err != nil {
			return err
		}
	}
}

// Failpoints is the file that tells a daemon with failpoints (Binaries, MINICRI_BIN) what is to happen at
// which of them.
type Failpoints string

// Option has the daemon read the file.
func (f Failpoints) Option() Option { return Env("MINICRI_FAILPOINTS=" + string(f)) }

// Arm says what is to happen at which points: "POINT ACTION" each.
func (f Failpoints) Arm(t testing.TB, orders ...string) {
	harness.Check(t, harness.IgnoreMissing(os.Remove(string(f)+".hit")))
	var lines strings.Builder
	for _, order := range orders {
		space := strings.LastIndexByte(order, ' ')
		fmt.Fprintf(&lines, "%s\t%s\n", order[:space], order[space+1:])
	}
	harness.Check(t, os.WriteFile(string(f)+".new", []byte(lines.String()), 0o600))
	harness.Check(t, os.Rename(string(f)+".new", string(f)))
}

// Disarm has nothing happen any more.
func (f Failpoints) Disarm(t testing.TB) {
	harness.Check(t, harness.IgnoreMissing(os.Remove(string(f))))
}

// WasHit reports whether a point was reached since Arm.
func (f Failpoints) WasHit() bool {
	_, err := os.Stat(string(f) + ".hit")
	return err == nil
}
