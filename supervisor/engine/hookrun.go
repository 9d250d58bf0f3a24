package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// RunHook runs a hook: LIMIT PATH ARGUMENT-0 ARGUMENT... The hook gets
// our input and environment. At its limit, or when this process has to end, it ends
// with all that it has started. What it says is passed on, at most hookOutput
// bytes, and an error names it. The result is the exit status.
func RunHook(args []string) int {
	if len(args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: minicri-shim hook LIMIT PATH ARGUMENT-0...")
		return 2
	}
	path := args[1]
	if err := runHook(args[0], path, args[2:]); err != nil {
		fmt.Fprintf(os.Stderr, "hook %s: %v", path, err)
		return 1
	}
	return 0
}

// hookOutput is how much of what a hook says is passed on.
const hookOutput = 2048

func runHook(limit, path string, args []string) error {
	allowed, err := time.ParseDuration(limit)
	if err != nil {
		return err
	}
	// What the hook leaves becomes our child, so that it can be found.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become sub-reaper: %w", err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	ctx, cancel := context.WithTimeoutCause(ctx, allowed, fmt.Errorf("not done within %v", allowed))
	defer cancel()
	// No pipe: what the hook leaves in the background would hold it open.
	output, err := memoryFile()
	if err != nil {
		return err
	}
	defer output.Close()
	command := exec.Cmd{Path: path, Args: args, Env: os.Environ(), Stdin: os.Stdin, Stdout: output, Stderr: output, SysProcAttr: &syscall.SysProcAttr{Setpgid: true}}
	if err := command.Start(); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- command.Wait() }()
	select {
	case err = <-ended:
	case <-ctx.Done():
		endTree(command.Process.Pid)
		<-ended
		err = context.Cause(ctx)
	}
	said := make([]byte, hookOutput)
	n, readErr := output.ReadAt(said, 0)
	if readErr != nil && !errors.Is(readErr, io.EOF) {
		return errors.Join(err, readErr)
	}
	if err != nil && n > 0 {
		return fmt.Errorf("%w: %s", err, said[:n])
	}
	return err
}

func memoryFile() (*os.File, error) {
	fd, err := unix.MemfdCreate("hook", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("memfd_create: %w", err)
	}
	return os.NewFile(uintptr(fd), "hook"), nil
}

// endTree kills the hook's process group and our descendants: a killed one
// leaves its children to us. In the pid namespace of a container whose /proc is
// not mounted yet pids of descendants are not known; they end with its cgroup.
func endTree(group int) {
	_ = syscall.Kill(-group, syscall.SIGKILL)
	if self, err := os.Readlink("/proc/self"); err != nil || self != strconv.Itoa(os.Getpid()) {
		return
	}
	for deadline := time.Now().Add(hookMargin / 2); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		alive := false
		for _, pid := range listChildren() {
			if syscall.Kill(pid, syscall.SIGKILL) == nil && !isZombie(pid) {
				alive = true
			}
		}
		if !alive {
			return
		}
	}
}

func isZombie(pid int) bool {
	var info unix.Siginfo
	err := unix.Waitid(unix.P_PID, pid, &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
	return err == nil && info.Signo != 0
}

// listChildren lists the children of all our threads (proc_pid_task_children(5)).
func listChildren() (pids []int) {
	lists, _ := filepath.Glob("/proc/self/task/*/children")
	for _, list := range lists {
		content, _ := os.ReadFile(list) // the thread may have ended
		for field := range strings.FieldsSeq(string(content)) {
			if pid, err := strconv.Atoi(field); err == nil {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}
