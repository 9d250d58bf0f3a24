package engine

import (
	"bufio"
	"cmp"
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
	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/supervisor/bundle"
	"github.com/minicri/minicri/supervisor/starter"
	"github.com/minicri/minicri/supervisor/stdio"
)

// runtimeContainer is a container of a runtime, a program with runc's command line, such as runc, crun and youki:
// https://github.com/opencontainers/runtime-tools/blob/master/docs/command-line-interface.md
// and runc's flags beyond it. Each verb runs the program. Root/ID is the container's directory and the
// runtime's bundle; Root/states has the runtime's states.
type runtimeContainer struct{ starter.Request }

func (c *runtimeContainer) states() string { return filepath.Join(c.Root, bundle.RuntimeStates) }

func (c *runtimeContainer) create(spec *specs.Spec, given streams) (answer starter.Answer, err error) {
	// Runtimes refuse versions newer than theirs (crun before 1.9 any but 1.0.x), but read newer fields.
	spec.Version = "1.0.2"
	for range 10 { // the removal of the last other container may remove the directories meanwhile
		if err = errors.Join(os.MkdirAll(c.Dir(), 0o700), os.MkdirAll(c.states(), 0o711)); !errors.Is(err, os.ErrNotExist) {
			break
		}
	}
	if err == nil {
		err = bundle.WriteJSON(filepath.Join(c.Dir(), "config.json"), spec)
	}
	if err != nil {
		return answer, errors.Join(fmt.Errorf("write the bundle of container %s: %w", c.ID, err), os.RemoveAll(c.Dir()))
	}
	if answer.PID, err = c.makeProcess(given, c.Dir(), "create", "--bundle", c.Dir()); err == nil {
		answer.Cgroups, err = c.findCgroups(answer.PID)
	}
	if err != nil {
		return answer, errors.Join(err, c.delete())
	}
	help, _ := exec.Command(c.Runtime[0], "exec", "--help").CombinedOutput() // without help there is no such flag
	if text := string(help); strings.Contains(text, "--cgroup") {
		answer.ExecCgroups = starter.ExecCgroupByPath
		if strings.Contains(text, "controller") {
			answer.ExecCgroups = starter.ExecCgroupByName
		}
	}
	return answer, nil
}

// findCgroups returns init's cgroups by controller, "" for version 2: only those with the container's name,
// as others may hold other processes, such as the supervisor.
func (c *runtimeContainer) findCgroups(pid int) (map[string]string, error) {
	own, err := cgroups.ParseCgroupFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return nil, fmt.Errorf("find the cgroups of container %s: %w", c.ID, err)
	}
	found, name := make(map[string]string), ""
	if config := c.CgroupConfig(); config != nil && config.Systemd {
		name = config.ScopePrefix + "-" + config.Name + ".scope"
	} else if config != nil {
		name = filepath.Base(config.Path)
	}
	for controller, path := range own {
		if name == "" || !slices.Contains(strings.Split(path, "/"), name) {
			continue
		}
		mount := "/sys/fs/cgroup"
		if !cgroups.IsCgroup2UnifiedMode() {
			if mount, err = cgroups.FindCgroupMountpoint("", controller); controller == "" || cgroups.IsNotFound(err) {
				continue // the hybrid hierarchy has no controllers, and named ones are not mounted
			}
			if err != nil {
				return nil, fmt.Errorf("find the cgroups of container %s: %w", c.ID, err)
			}
		}
		found[controller] = filepath.Join(mount, path)
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("%s has put process %d of container %s into %v, not into %q", c.Runtime[0], pid, c.ID, own, c.CgroupsPath)
	}
	return found, nil
}

func (c *runtimeContainer) exec(given streams) (int, error) {
	scratch, err := os.MkdirTemp(c.Dir(), "exec-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(scratch)
	file := filepath.Join(scratch, "process.json")
	if err := bundle.WriteJSON(file, c.Process); err != nil {
		return 0, err
	}
	arguments := []string{"--detach", "--process", file}
	if group := c.ExecCgroup; group.Sub != "" {
		path := group.Sub
		if group.Controller != "" && group.Form == starter.ExecCgroupByName {
			path = group.Controller + ":" + path
		}
		arguments = append(arguments, "--cgroup", path)
	}
	if adjust := c.Process.OOMScoreAdj; adjust != nil {
		_ = writeOOMScoreAdj(os.Getpid(), strconv.Itoa(*adjust)) // crun's commands inherit it; it may be forbidden
	}
	return c.makeProcess(given, scratch, "exec", arguments...)
}

func (c *runtimeContainer) start() error { return c.run(streams{}, nil, "start", c.ID) }

func (c *runtimeContainer) setResources(wanted *specs.LinuxResources, _ *int) error {
	file := filepath.Join(c.Dir(), "resources.json")
	if err := bundle.WriteJSON(file, wanted); err != nil {
		return err
	}
	return c.run(streams{}, nil, "update", "--resources", file, c.ID)
}

func (c *runtimeContainer) delete() error {
	if err := c.Cgroups.Signal("", unix.SIGKILL); err != nil {
		return err
	}
	err := c.run(streams{}, nil, "delete", "--force", c.ID)
	if err != nil && c.run(streams{}, nil, "state", c.ID) == nil {
		return err // it still knows the container
	}
	return c.Remove()
}

// makeProcess runs a verb that makes a process, and returns its pid, which the runtime writes into scratch.
func (c *runtimeContainer) makeProcess(given streams, scratch, verb string, arguments ...string) (pid int, err error) {
	pidFile := filepath.Join(scratch, "pid")
	arguments = append([]string{"--pid-file", pidFile}, arguments...)
	var passed []*os.File
	var terminal *net.UnixListener
	if given.console != nil {
		// The runtime gets the directory as descriptor 3: the socket's path may not exceed 107 characters (unix(7)).
		directory, err := os.Open(scratch)
		if err != nil {
			return 0, err
		}
		defer directory.Close()
		name := fmt.Sprintf("/proc/self/fd/%d/console", directory.Fd())
		if terminal, err = net.ListenUnix("unix", &net.UnixAddr{Name: name, Net: "unix"}); err != nil {
			return 0, err
		}
		defer terminal.Close()
		passed = append(passed, directory)
		arguments = append(arguments, "--console-socket", "/proc/self/fd/3/console")
	}
	if err := c.run(given, passed, verb, append(arguments, c.ID)...); err != nil {
		return 0, err
	}
	content, err := os.ReadFile(pidFile)
	if err == nil {
		if pid, err = strconv.Atoi(strings.TrimSpace(string(content))); err != nil || pid < 1 {
			err = fmt.Errorf("%s says %q, no process id", pidFile, content)
		}
	}
	if err == nil {
		var stat process.Stat
		if stat, err = process.ReadStat(pid); err == nil && stat.Parent != os.Getpid() {
			err = fmt.Errorf("process %d is not one that it has started", pid)
		}
	}
	if err != nil {
		return 0, fmt.Errorf("%s %s of container %s has ended without an error, but has made no process: %w", c.Runtime[0], verb, c.ID, err)
	}
	if terminal != nil {
		if err := forward(terminal, given.console); err != nil {
			return 0, errors.Join(fmt.Errorf("%s %s of container %s: %w", c.Runtime[0], verb, c.ID, err), killProcess(pid))
		}
	}
	return pid, nil
}

// forward sends on the master of a terminal, which the runtime sent before it ended.
func forward(terminal *net.UnixListener, to *os.File) error {
	if err := terminal.SetDeadline(time.Now().Add(stdio.MasterLimit)); err != nil {
		return err
	}
	connection, err := terminal.AcceptUnix()
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

// run runs the runtime with global flags, the arguments, and the files after its standard streams. It
// returns the last error that the runtime logged.
func (c *runtimeContainer) run(given streams, passed []*os.File, verb string, arguments ...string) error {
	log, err := os.CreateTemp(c.Dir(), "log-")
	if err != nil {
		return fmt.Errorf("%s of container %s: %w", verb, c.ID, err)
	}
	defer os.Remove(log.Name())
	defer log.Close()
	flags := []string{"--root", c.states(), "--log", log.Name(), "--log-format", "json"}
	if c.SystemdCgroup {
		flags = append(flags, "--systemd-cgroup")
	}
	command := exec.Command(c.Runtime[0], slices.Concat(c.Runtime[1:], flags, []string{verb}, arguments)...)
	// Init inherits the streams. The runtime itself writes to its log.
	given.setOn(&command.Stdin, &command.Stdout, &command.Stderr)
	command.ExtraFiles = passed
	command.Dir = "/"
	command.Env = []string{"PATH=" + os.Getenv("PATH"), "XDG_RUNTIME_DIR=" + c.states()} // PATH has runtimes' helpers
	if err = command.Run(); err == nil {
		return nil
	}
	said := lastError(log)
	err = fmt.Errorf("%s %s: %s", filepath.Base(c.Runtime[0]), verb, cmp.Or(said, err.Error()))
	// The words of runc (init_linux.go) and crun (execvp and find_executable in its linux.c) for a program, a
	// directory or a user that the container lacks.
	lacks := []string{
		"unable to start container process", "executable file", "open executable", "exec failed", "chdir to", "cannot find",
	}
	if slices.ContainsFunc(lacks, func(words string) bool { return strings.Contains(said, words) }) {
		return fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition)
	}
	return err
}

// lastError returns the last error at the end of a runtime's log, "" if there is none.
func lastError(log *os.File) (message string) {
	const maxLog = 32 << 10
	size, _ := log.Seek(0, io.SeekEnd)
	for lines := bufio.NewScanner(io.NewSectionReader(log, max(0, size-maxLog), maxLog)); lines.Scan(); {
		var line struct{ Level, Msg string }
		if json.Unmarshal(lines.Bytes(), &line) == nil && line.Level == "error" {
			message = strings.TrimSpace(line.Msg)
		}
	}
	return message
}
