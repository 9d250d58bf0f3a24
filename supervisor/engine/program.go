package engine

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/supervisor/cgroup"
	"github.com/minicri/minicri/supervisor/runtime"
	"github.com/minicri/minicri/supervisor/starter"
	"github.com/minicri/minicri/supervisor/stdio"
)

// programContainer is a container of a program with runc's command line, such as runc,
// crun and youki:
// https://github.com/opencontainers/runtime-tools/blob/master/docs/command-line-interface.md
// and the flags that runc has beyond it. Each verb is a run of the program. Root/ID is
// the container's directory, and has the bundle that the program gets; Root/states has
// the program's states.
type programContainer struct{ starter.Request }

func (c *programContainer) dir() string    { return filepath.Join(c.Root, c.ID) }
func (c *programContainer) states() string { return filepath.Join(c.Root, runtime.ProgramStates) }

func (c *programContainer) create(spec *specs.Spec, given streams) (answer starter.Answer, err error) {
	if err := c.writeBundle(spec); err != nil {
		return answer, errors.Join(fmt.Errorf("write the bundle of container %s: %w", c.ID, err), os.RemoveAll(c.dir()))
	}
	if answer.PID, err = c.launch(given, "create", "--bundle", c.dir()); err == nil {
		answer.Cgroups, err = c.findCgroups(answer.PID)
	}
	if err != nil {
		return answer, errors.Join(err, c.delete())
	}
	answer.ExecCgroups = c.askExecCgroups()
	return answer, nil
}

// oldestVersion is the version of the runtime-spec that bundles name. Runtimes
// refuse versions that are newer than they are (crun before 1.9 any but 1.0.x)
// and read what they know of fields that came later all the same.
const oldestVersion = "1.0.2"

func (c *programContainer) writeBundle(spec *specs.Spec) error {
	if err := c.makeDirectories(); err != nil {
		return err
	}
	old := *spec
	old.Version = oldestVersion
	return writeJSON(filepath.Join(c.dir(), "config.json"), &old)
}

// makeDirectories is tried again where the removal of the last other container removes
// them at the same moment.
func (c *programContainer) makeDirectories() (err error) {
	for range 10 {
		if err = errors.Join(os.MkdirAll(c.dir(), 0o700), os.MkdirAll(c.states(), 0o711)); !errors.Is(err, os.ErrNotExist) {
			break
		}
	}
	return err
}

// findCgroups returns init's cgroups: those that were made for the container. A
// process that is in none of them is another one.
func (c *programContainer) findCgroups(pid int) (map[string]string, error) {
	found, err := cgroupsOfProcess(pid)
	if err != nil {
		return nil, fmt.Errorf("cgroups of container %s: %w", c.ID, err)
	}
	of := made(found, c.CgroupsPath)
	if len(of) == 0 {
		return nil, fmt.Errorf("%s has put process %d of container %s into %v, not into %q", c.Program[0], pid, c.ID, found, c.CgroupsPath)
	}
	return of, nil
}

// cgroupsOfProcess are the cgroups of a process by controller, "" for version 2, as
// paths below the mount points.
func cgroupsOfProcess(pid int) (map[string]string, error) {
	own, err := cgroups.ParseCgroupFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return nil, err
	}
	if cgroups.IsCgroup2UnifiedMode() {
		return map[string]string{"": filepath.Join("/sys/fs/cgroup", own[""])}, nil
	}
	found := make(map[string]string)
	for controller, path := range own {
		if controller == "" {
			continue // the hybrid hierarchy has no controllers
		}
		root, mountErr := cgroups.FindCgroupMountpoint("", controller)
		if cgroups.IsNotFound(mountErr) {
			continue // named hierarchies that are mounted nowhere
		}
		if mountErr != nil {
			err = errors.Join(err, mountErr)
			continue
		}
		found[controller] = filepath.Join(root, path)
	}
	return found, err
}

// made are those of a process's cgroups that were made for the container: the rest may
// hold other processes, the supervisor above all.
func made(found map[string]string, cgroupsPath string) map[string]string {
	name := cgroupName(cgroupsPath)
	of := maps.Clone(found)
	maps.DeleteFunc(of, func(_, path string) bool { return name == "" || !slices.Contains(strings.Split(path, "/"), name) })
	return of
}

// cgroupName is the last part of the path that a spec's cgroupsPath asks for; of
// systemd's form, SLICE:PREFIX:NAME, that is the scope.
func cgroupName(cgroupsPath string) string {
	if parts := strings.Split(cgroupsPath, ":"); len(parts) == 3 {
		return parts[1] + "-" + parts[2] + ".scope"
	}
	if name := filepath.Base(cgroupsPath); name != "." && name != "/" {
		return name
	}
	return ""
}

// How a program takes the cgroup of an exec.
const (
	execCgroupPath   = "path" // --cgroup PATH, below the container's, version 2 alone: crun
	execCgroupByName = "name" // --cgroup [CONTROLLER:]PATH: runc
)

// askExecCgroups asks the program itself, by the help of its verb.
func (c *programContainer) askExecCgroups() string {
	help, _ := exec.Command(c.Program[0], "exec", "--help").CombinedOutput() // one without help has no such flag
	switch text := string(help); {
	case !strings.Contains(text, "--cgroup"):
		return ""
	case strings.Contains(text, "controller"):
		return execCgroupByName
	default:
		return execCgroupPath
	}
}

func (c *programContainer) exec(given streams) (int, error) {
	process, err := processOf(c.Request)
	if err != nil {
		return 0, err
	}
	scratch, err := os.MkdirTemp(c.dir(), "process-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(scratch)
	file := filepath.Join(scratch, "process.json")
	if err := writeJSON(file, process); err != nil {
		return 0, err
	}
	arguments := []string{"--detach", "--process", file}
	if group := c.ExecCgroup; group.Sub != "" {
		path := group.Sub
		if group.Controller != "" && group.Form == execCgroupByName {
			path = group.Controller + ":" + path
		}
		arguments = append(arguments, "--cgroup", path)
	}
	if process.OOMScoreAdj != nil { // crun leaves a command what it has inherited; one that may not be set stays
		_ = writeOOMScoreAdj(os.Getpid(), strconv.Itoa(*process.OOMScoreAdj))
	}
	return c.launch(given, "exec", arguments...)
}

func (c *programContainer) start() error { return c.run(nil, streams{}, nil, "start", c.ID) }

func (c *programContainer) setResources(wanted *specs.LinuxResources, _ *int) error {
	encoded, err := json.Marshal(wanted)
	if err != nil {
		return err
	}
	return c.run(encoded, streams{}, nil, "update", "--resources", "-", c.ID)
}

func (c *programContainer) delete() error {
	if err := cgroup.Paths(c.Cgroups).Signal(unix.SIGKILL); err != nil {
		return err
	}
	err := c.run(nil, streams{}, nil, "delete", "--force", c.ID)
	if err != nil && c.run(nil, streams{}, nil, "state", c.ID) == nil {
		return err // it still knows the container
	}
	return runtime.RemoveState(c.dir(), c.Cgroups, c.CgroupsPath, c.SystemdCgroup)
}

// launch runs a verb that makes a process of the container, and returns its pid.
func (c *programContainer) launch(given streams, verb string, arguments ...string) (int, error) {
	scratch, err := os.MkdirTemp(c.dir(), verb+"-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(scratch)
	pidFile := filepath.Join(scratch, "pid")
	arguments = append([]string{"--pid-file", pidFile}, arguments...)
	var passed []*os.File
	var terminal *console
	if given.console != nil {
		if terminal, err = listenForConsole(scratch); err != nil {
			return 0, err
		}
		defer terminal.close()
		passed = append(passed, terminal.directory)
		arguments = append(arguments, "--console-socket", terminal.path())
	}
	if err := c.run(nil, given, passed, verb, append(arguments, c.ID)...); err != nil {
		return 0, err
	}
	pid, err := readPID(pidFile)
	if err == nil && !starter.IsChild(pid) {
		err = fmt.Errorf("process %d is not one that it has started", pid)
	}
	if err != nil {
		return 0, fmt.Errorf("%s %s of container %s has ended without an error, but has made no process: %w", c.Program[0], verb, c.ID, err)
	}
	if terminal != nil {
		if err := terminal.forward(given.console); err != nil {
			return 0, errors.Join(fmt.Errorf("%s %s of container %s: %w", c.Program[0], verb, c.ID, err), killProcess(pid))
		}
	}
	return pid, nil
}

// run runs the program with global flags and the arguments, and gives it the
// files after its standard streams. Its error is the last one that the program
// has logged.
func (c *programContainer) run(stdin []byte, given streams, passed []*os.File, verb string, arguments ...string) error {
	log, err := os.CreateTemp(c.dir(), "log-")
	if err != nil {
		return fmt.Errorf("%s of container %s: %w", verb, c.ID, err)
	}
	defer os.Remove(log.Name())
	defer log.Close()
	flags := []string{"--root", c.states(), "--log", log.Name(), "--log-format", "json"}
	if c.SystemdCgroup {
		flags = append(flags, "--systemd-cgroup")
	}
	command := exec.Command(c.Program[0], slices.Concat(c.Program[1:], flags, []string{verb}, arguments)...)
	command.WaitDelay = time.Second // for a process that holds the pipe of stdin
	// The streams become those of init: files, so that nothing is copied. What
	// the program itself writes goes to its log.
	if file := given.stdio[0]; file != nil {
		command.Stdin = file
	} else if stdin != nil {
		command.Stdin = bytes.NewReader(stdin)
	}
	if file := given.stdio[1]; file != nil {
		command.Stdout = file
	}
	if file := given.stdio[2]; file != nil {
		command.Stderr = file
	}
	command.ExtraFiles = passed
	// Without the supervisor's environment but for PATH: runtimes look for their helpers
	// there.
	command.Dir = "/"
	command.Env = []string{"PATH=" + os.Getenv("PATH"), "XDG_RUNTIME_DIR=" + c.states()}
	if bus := os.Getenv("DBUS_SYSTEM_BUS_ADDRESS"); bus != "" {
		command.Env = append(command.Env, "DBUS_SYSTEM_BUS_ADDRESS="+bus)
	}
	if err = command.Run(); err == nil {
		return nil
	}
	said := lastError(log.Name())
	err = fmt.Errorf("%s %s: %s", filepath.Base(c.Program[0]), verb, cmp.Or(said, err.Error()))
	if isContainersFault(said) {
		return fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition)
	}
	return err
}

// maxLog is how much of a log's end is looked at.
const maxLog = 32 << 10

// lastError is the message of the last error in a log of the runtime's, "" if
// there is none.
func lastError(path string) (message string) {
	file, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer file.Close()
	if size, err := file.Seek(0, io.SeekEnd); err == nil {
		_, _ = file.Seek(max(0, size-maxLog), io.SeekStart)
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

// console is where the program hands over the master of a terminal that it made. The
// socket is reached through a descriptor of its directory: a unix socket's path has 107
// characters at most (unix(7)).
type console struct {
	directory *os.File
	listener  *net.UnixListener
}

const consoleName = "console"

func listenForConsole(scratch string) (*console, error) {
	directory, err := os.Open(scratch)
	if err != nil {
		return nil, err
	}
	path := fmt.Sprintf("/proc/self/fd/%d/%s", directory.Fd(), consoleName)
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, errors.Join(err, directory.Close())
	}
	return &console{directory, listener}, nil
}

// path is where the program finds the socket: the directory is its first descriptor
// after the standard ones.
func (*console) path() string { return "/proc/self/fd/3/" + consoleName }

// forward sends the terminal on: it has been sent when the program has ended.
func (c *console) forward(to *os.File) error {
	if err := c.listener.SetDeadline(time.Now().Add(time.Second)); err != nil {
		return err
	}
	connection, err := c.listener.AcceptUnix()
	if err != nil {
		return fmt.Errorf("receive the terminal: %w", err)
	}
	defer connection.Close()
	master, err := stdio.ReceiveMaster(connection)
	if err != nil {
		return err
	}
	defer master.Close()
	return os.NewSyscallError("sendmsg", unix.Sendmsg(int(to.Fd()), []byte("terminal"), unix.UnixRights(int(master.Fd())), nil, 0))
}

func (c *console) close() {
	_ = c.listener.Close()
	_ = c.directory.Close()
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
