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

// IDMapping maps IDs of a user namespace to the host's (user_namespaces(7), "User and group ID mappings").
type IDMapping struct {
	ContainerID, HostID, Length uint32
}

// Holder is a process that waits in a new user namespace and a new network namespace owned by it until both
// are pinned. One clone(2) makes the user namespace first: it then owns the network namespace, whose sysfs
// only a process privileged in the owner can mount.
type Holder struct {
	command *exec.Cmd
	opened  map[string]*os.File
}

// StartHolder runs the program, which has to wait until it is killed, in new namespaces with the mappings.
// The holder dies with the daemon: the kernel kills it when its starting thread exits (PR_SET_PDEATHSIG). So
// the calling goroutine keeps its thread until it calls End itself.
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
	h := &Holder{command: command, opened: make(map[string]*os.File)}
	if err := h.open(); err != nil {
		return nil, errors.Join(err, h.End())
	}
	return h, nil
}

// open opens the namespaces at once: when the holder has exited and is reaped, also by process.ReapOrphans,
// its PID and its path in /proc may belong to any process.
func (h *Holder) open() error {
	for _, kind := range []string{"user", "net"} {
		file, err := os.Open(filepath.Join("/proc", strconv.Itoa(h.command.Process.Pid), "ns", kind))
		if err != nil {
			return fmt.Errorf("open a new %s namespace: %w", kind, err)
		}
		h.opened[kind] = file
	}
	// The pidfd proves that the holder was not reaped until now, and the PID was its own.
	if err := h.command.Process.Signal(syscall.Signal(0)); err != nil {
		return fmt.Errorf("the process in a new user namespace has ended: %w", err)
	}
	return nil
}

func sysProcMappings(mappings []IDMapping) []syscall.SysProcIDMap {
	var result []syscall.SysProcIDMap
	for _, m := range mappings {
		result = append(result, syscall.SysProcIDMap{ContainerID: int(m.ContainerID), HostID: int(m.HostID), Size: int(m.Length)})
	}
	return result
}

// Pin pins the holder's namespace of the kind "user" or "net" for id, even if the holder has exited.
func (h *Holder) Pin(namespaces *Dir, id, kind string) error {
	return namespaces.Pin(id, fmt.Sprintf("/proc/self/fd/%d", h.opened[kind].Fd()))
}

// End kills the holder and waits for it. It does nothing on a nil holder or when called again.
func (h *Holder) End() error {
	if h == nil || h.command == nil {
		return nil
	}
	command := h.command
	h.command = nil
	defer runtime.UnlockOSThread()
	for _, file := range h.opened {
		_ = file.Close() // of an nsfs file, which has nothing to write
	}
	if err := command.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill the process that holds the user namespace: %w", err)
	}
	_ = command.Wait() // it was killed, or ended long ago and was reaped as an orphan
	return nil
}
