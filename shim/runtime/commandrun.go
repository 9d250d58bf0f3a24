package runtime

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/shim/stdio"
)

// run runs the program with global flags and the arguments, and gives it the
// files after its standard streams. Its error is the last one that the program
// has logged.
func (c *commandContainer) run(stdin []byte, streams Streams, given files, arguments ...string) error {
	log, err := os.CreateTemp(c.bundle, "log-")
	if err != nil {
		return fmt.Errorf("%s of container %s: %w", arguments[0], c.id, err)
	}
	defer os.Remove(log.Name())
	defer log.Close()
	flags := []string{"--root", c.runtime.root, "--log", log.Name(), "--log-format", "json"}
	if c.runtime.systemdCgroup {
		flags = append(flags, "--systemd-cgroup")
	}
	ctx, over := c.runtime.runs.begin(c.id, arguments[0])
	defer over()
	command := exec.CommandContext(ctx, c.runtime.program[0], slices.Concat(c.runtime.program[1:], flags, arguments)...)
	command.Cancel = func() error { return endRun(command.Process) }
	command.WaitDelay = time.Second // for a process that holds the pipe of stdin
	// The streams become those of init: files, so that nothing is copied. What
	// the program itself writes goes to its log.
	switch {
	case streams.Stdin != nil:
		command.Stdin = streams.Stdin
	case stdin != nil:
		command.Stdin = bytes.NewReader(stdin)
	}
	if streams.Stdout != nil {
		command.Stdout = streams.Stdout
	}
	if streams.Stderr != nil {
		command.Stderr = streams.Stderr
	}
	command.ExtraFiles = given
	// Not in the shim's directory, and without its environment but for PATH:
	// runtimes look for their helpers there.
	command.Dir = "/"
	command.Env = []string{"PATH=" + os.Getenv("PATH"), "XDG_RUNTIME_DIR=" + c.runtime.root}
	if bus := os.Getenv("DBUS_SYSTEM_BUS_ADDRESS"); bus != "" {
		command.Env = append(command.Env, "DBUS_SYSTEM_BUS_ADDRESS="+bus)
	}
	if err = command.Start(); err == nil {
		if arguments[0] == verbExec {
			c.inheritOOMScoreAdj(command.Process.Pid)
		}
		err = command.Wait()
	}
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return fmt.Errorf("%s %s of container %s: %w", filepath.Base(c.runtime.program[0]), arguments[0], c.id, context.Cause(ctx))
	}
	said := lastError(log.Name())
	err = fmt.Errorf("%s %s: %s", filepath.Base(c.runtime.program[0]), arguments[0], cmp.Or(said, err.Error()))
	if isContainersFault(said) {
		return fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition)
	}
	return err
}

// mostLog is how much of a log's end is looked at.
const mostLog = 32 << 10

// lastError is the message of the last error in a log of the runtime's, "" if
// there is none.
func lastError(path string) (message string) {
	file, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer file.Close()
	if size, err := file.Seek(0, io.SeekEnd); err == nil {
		_, _ = file.Seek(max(0, size-mostLog), io.SeekStart)
	}
	for lines := bufio.NewScanner(file); lines.Scan(); {
		var line struct{ Level, Msg string }
		if json.Unmarshal(lines.Bytes(), &line) == nil && line.Level == "error" {
			message = strings.TrimSpace(line.Msg)
		}
	}
	return message
}

// isContainersFault reports whether a runtime's message says that the
// container asks for what it does not have: a program, a directory, a user.
// The words are those of runc (init_linux.go, "unable to start container
// process") and crun (execvp and find_executable in its linux.c).
func isContainersFault(message string) bool {
	for _, words := range [...]string{"unable to start container process", "executable file", "open executable", "exec failed", "chdir to", "cannot find"} {
		if strings.Contains(message, words) {
			return true
		}
	}
	return false
}

// consoleListener is where the runtime hands over the master of a terminal
// that it made. The socket is reached through a descriptor of its directory:
// a unix socket's path has 107 characters at most (unix(7)).
type consoleListener struct {
	directory *os.File
	listener  *net.UnixListener
}

const consoleName = "console"

// console listens if the process gets a terminal; nil otherwise.
func (*commandContainer) console(streams Streams, scratch string) (*consoleListener, error) {
	if !streams.Terminal {
		return nil, nil
	}
	directory, err := os.Open(scratch)
	if err != nil {
		return nil, err
	}
	path := fmt.Sprintf("/proc/self/fd/%d/%s", directory.Fd(), consoleName)
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, errors.Join(err, directory.Close())
	}
	return &consoleListener{directory, listener}, nil
}

// path is where the runtime finds the socket: the directory is its descriptor
// after the standard ones and those before it.
func (*consoleListener) path(before int) string {
	return fmt.Sprintf("/proc/self/fd/%d/%s", 3+before, consoleName)
}

// receive takes the terminal, which has been sent when the runtime has ended.
func (l *consoleListener) receive() (*os.File, error) {
	_ = l.listener.SetDeadline(time.Now().Add(time.Second))
	connection, err := l.listener.AcceptUnix()
	if err != nil {
		return nil, fmt.Errorf("the runtime has not handed over the terminal: %w", err)
	}
	defer connection.Close()
	socket, err := connection.File()
	if err != nil {
		return nil, err
	}
	defer socket.Close()
	return stdio.ReceiveMaster(socket)
}

func (l *consoleListener) close() {
	_ = l.listener.Close()
	_ = l.directory.Close()
}

// readPID reads a file of --pid-file.
func readPID(path string) (int, error) {
	content, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(content)))
	if err != nil || pid < 1 {
		return 0, fmt.Errorf("%s says %q, no process id", path, content)
	}
	return pid, nil
}
