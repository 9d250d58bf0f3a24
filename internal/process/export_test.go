package process

import (
	"os"

	"golang.org/x/sys/unix"
)

// For the tests.
const ReapAfter = reapAfter

var AddSeals = addSeals

// OpenOutsideThePoller opens a process as Open does where the poller has no room for its pidfd.
func OpenOutsideThePoller(facts Facts) (*Process, error) {
	fd, err := unix.PidfdOpen(facts.PID, 0)
	return &Process{Facts: facts, pidfd: os.NewFile(uintptr(fd), "pidfd")}, err
}
