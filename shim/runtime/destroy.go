package runtime

import (
	"errors"
	"fmt"
	"os"

	"github.com/opencontainers/runc/libcontainer"
	"golang.org/x/sys/unix"
)

// destroy kills what runs of a container and removes its cgroup and its state.
// It may be called in any state and again; process may never have started.
func destroy(container *libcontainer.Container, process *libcontainer.Process) error {
	if err := process.Signal(unix.SIGKILL); err == nil {
		_, _ = process.Wait() // killed: the exit status says nothing new
	} else if _, pidErr := process.Pid(); pidErr == nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("destroy container %s: kill: %w", container.ID(), err)
	}
	if err := container.Destroy(); err != nil {
		return fmt.Errorf("destroy container %s: %w", container.ID(), err)
	}
	return nil
}
