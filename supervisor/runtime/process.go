package runtime

import (
	"errors"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/supervisor/cgroup"
	"github.com/minicri/minicri/supervisor/children"
	"github.com/minicri/minicri/supervisor/launch"
)

// Process is a process of a container: one that was made for this supervisor, its
// child, or for an earlier one. Its owner waits for it once, and
// closes it.
type Process struct {
	process.Facts
	Terminal *os.File // the terminal's master; nil without one

	found *process.Process // nil for one that is Gone
	child *children.Child  // nil: it is not ours
	group *cgroup.Exec     // of an exec; nil if only the process itself can be ended
}

// Find returns the process with that pid and start time, which is no child of ours. The
// start time tells it from another one that was given its pid. An error says nothing of it.
func Find(facts process.Facts) (*Process, error) {
	found, err := process.Find(facts.PID)
	if err == nil && found.Facts == facts {
		return &Process{Facts: facts, found: found}, nil
	}
	if err == nil {
		err = found.Close()
	} else if errors.Is(err, process.ErrGone) {
		err = nil
	}
	return &Process{Facts: facts}, err
}

// launched is a process that a launch has made.
func launched(l *launch.Launched) *Process {
	return &Process{Facts: l.Process.Facts, found: l.Process, child: l.Child}
}

// Gone reports whether the process had ended before it was found.
func (p *Process) Gone() bool { return p.found == nil }

// Signal sends a signal to the process; os.ErrProcessDone if it has ended.
func (p *Process) Signal(sig syscall.Signal) error {
	if p.Gone() {
		return os.ErrProcessDone
	}
	return p.found.Signal(sig)
}

// KillTree ends the process and, of an exec, all that it started.
func (p *Process) KillTree() error {
	err := p.Signal(unix.SIGKILL)
	if errors.Is(err, os.ErrProcessDone) {
		err = nil
	}
	if p.group != nil {
		err = errors.Join(err, p.group.Kill())
	}
	return err
}

// Ended returns when the process has ended; it is not reaped by that. An error
// says that the process was closed.
func (p *Process) Ended() error {
	if p.Gone() {
		return nil
	}
	return p.found.Wait()
}

// Wait waits until a process of ours is reaped, and returns its exit status.
func (p *Process) Wait() (status syscall.WaitStatus, known bool) {
	if p.child == nil {
		return 0, false
	}
	return p.child.Wait(), true
}

// Reaped reports whether an ended process was waited for by its parent.
func (p *Process) Reaped() bool {
	stat, err := process.ReadStat(p.PID)
	return errors.Is(err, process.ErrGone) || err == nil && stat.StartTime != p.StartTime
}

// Exiting reports whether the process ends or has ended: its namespaces may be gone.
func (p *Process) Exiting() bool {
	stat, err := process.ReadStat(p.PID)
	return errors.Is(err, process.ErrGone) || err == nil && (stat.Exiting || stat.StartTime != p.StartTime)
}

// KernelExit is the exit status of an ended process that is not our child, as
// far as the kernel keeps it: on Linux 6.15, once the parent has reaped it.
func (p *Process) KernelExit() (status syscall.WaitStatus, known bool) {
	if !p.Gone() {
		_ = p.found.Control(func(pidfd int) { status, known = exitInfo(pidfd) })
	}
	return status, known
}

// Close releases what is held for the process, which lives on if it has not
// ended.
func (p *Process) Close() error {
	if p.group != nil {
		p.group.Close()
	}
	if p.Gone() {
		return nil
	}
	return p.found.Close()
}

// pidfdInfo is struct pidfd_info of linux/pidfd.h, version 0.
type pidfdInfo struct {
	mask     uint64
	cgroupid uint64
	ids      [11]uint32
	exitCode int32
}

const (
	pidfdGetInfo  = 0xC040FF0B // _IOWR(0xFF, 11, struct pidfd_info)
	pidfdInfoExit = 1 << 3
)

// exitInfo asks the kernel for the exit status of a process that was reaped.
// Kernels before 6.15 do not tell.
func exitInfo(pidfd int) (status syscall.WaitStatus, known bool) {
	info := pidfdInfo{mask: pidfdInfoExit}
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(pidfd), pidfdGetInfo, uintptr(unsafe.Pointer(&info)))
	return syscall.WaitStatus(info.exitCode), errno == 0 && info.mask&pidfdInfoExit != 0
}
