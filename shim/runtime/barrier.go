package runtime

import (
	"fmt"
	"os"
	"time"

	"github.com/opencontainers/runc/libcontainer"
)

// execPoll is how often release looks whether init has become the program. The
// exec follows the barrier within 0.1 ms.
const execPoll = 20 * time.Microsecond

// release lets init through the exec barrier and returns when it runs the
// container's program. libcontainer's Exec alone returns a little before that:
// the end of the fifo comes from an explicit close, not from the exec.
func release(container *libcontainer.Container, process *libcontainer.Process) error {
	pid, err := process.Pid()
	if err != nil {
		return err
	}
	exe := fmt.Sprintf("/proc/%d/exe", pid)
	init, err := os.Stat(exe)
	if err != nil {
		return fmt.Errorf("init (pid %d) died at the exec barrier: %w", pid, err)
	}
	if err := container.Exec(); err != nil {
		return err
	}
	for {
		now, err := os.Stat(exe)
		if err != nil { // a zombie has no executable
			return fmt.Errorf("the process (pid %d) is gone right after its start: %w", pid, err)
		}
		if !os.SameFile(init, now) {
			return nil
		}
		time.Sleep(execPoll)
	}
}
