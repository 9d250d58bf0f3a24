package namespace

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// IDMapping maps a range of ids of a user namespace to ids of the host
// (user_namespaces(7), "User and group ID mappings").
type IDMapping struct {
	ContainerID, HostID, Length uint32
}

// Holder is a process that waits in a new user namespace and in a new network
// namespace owned by it, until both have been pinned. A network namespace
// belongs to the user namespace that its creator is in, and only a process
// privileged there can mount its sysfs, so the user namespace has to come
// first; one clone(2) makes both in that order.
type Holder struct {
	command *exec.Cmd
}

// StartHolder runs the program, which has to wait until it is killed, in new
// namespaces with the given mappings. The holder ends with the daemon: it is
// killed when the thread that started it ends (PR_SET_PDEATHSIG), so the
// calling goroutine keeps its thread until End, which it has to call itself.
func StartHolder(program string, uids, gids []IDMapping) (*Holder, error) {
	command := exec.Command(program)
	command.Env = []string{}
	command.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:                 unix.CLONE_NEWUSER | unix.CLONE_NEWNET,
		UidMappings:                sysProcMappings(uids),
		GidMappings:                sysProcMappings(gids),
		GidMappingsEnableSetgroups: true,
		Pdeathsig:                  unix.SIGKILL,
	}
	runtime.LockOSThread()
	if err := command.Start(); err != nil {
		runtime.UnlockOSThread()
		return nil, fmt.Errorf("start a process in a new user namespace: %w", err)
	}
	return &Holder{command: command}, nil
}

func sysProcMappings(mappings []IDMapping) []syscall.SysProcIDMap {
	var result []syscall.SysProcIDMap
	for _, m := range mappings {
		result = append(result, syscall.SysProcIDMap{ContainerID: int(m.ContainerID), HostID: int(m.HostID), Size: int(m.Length)})
	}
	return result
}

// Pin pins the holder's namespace of the given kind ("user" or "net") for id.
// The pid cannot have been given to another process meanwhile: the holder is
// our child, and End has not waited for it yet.
func (h *Holder) Pin(namespaces *Dir, id, kind string) error {
	return namespaces.Pin(id, filepath.Join("/proc", strconv.Itoa(h.command.Process.Pid), "ns", kind))
}

// End kills the holder and waits for it. On a nil holder, and when called
// again, it does nothing.
func (h *Holder) End() error {
	if h == nil || h.command.ProcessState != nil {
		return nil
	}
	defer runtime.UnlockOSThread()
	if err := h.command.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill the process that holds the user namespace: %w", err)
	}
	var killed *exec.ExitError
	// ECHILD: it ended long ago and was reaped as nobody's.
	if err := h.command.Wait(); err != nil && !errors.As(err, &killed) && !errors.Is(err, unix.ECHILD) {
		return fmt.Errorf("wait for the process that held the user namespace: %w", err)
	}
	return nil
}
