package runtime

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/supervisor/cgroup"
	"github.com/minicri/minicri/supervisor/children"
)

// Process is a process of a container: one that was made for this supervisor, its
// child, or for an earlier one. Its owner waits for it once, and
// closes it.
type Process struct {
	PID       int
	StartTime uint64   // clock ticks since boot (proc_pid_stat(5), field 22)
	Terminal  *os.File // the terminal's master; nil without one

	pidfd *os.File        // nil for one that is Gone
	child *children.Child // nil: it is not ours
	group *cgroup.Exec    // of an exec; nil if only the process itself can be ended
}

// Find returns the process with that pid and start time, which is no child of ours. The
// start time tells it from another one that was given its pid. An error says nothing of it.
func Find(pid int, startTime uint64) (*Process, error) {
	p, err := openProcess(pid)
	if err == nil && p.StartTime == startTime {
		return p, nil
	}
	if err == nil {
		err = p.Close()
	} else if errors.Is(err, process.ErrGone) {
		err = nil
	}
	return &Process{PID: pid, StartTime: startTime}, err
}

// Gone reports whether the process had ended before it was found.
func (p *Process) Gone() bool { return p.pidfd == nil }

func openProcess(pid int) (*Process, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) { // EINVAL: no pid of a process
		return nil, fmt.Errorf("open process %d: %w: %w", pid, process.ErrGone, err)
	}
	if err != nil {
		return nil, fmt.Errorf("open process %d: %w", pid, os.NewSyscallError("pidfd_open", err))
	}
	p := &Process{PID: pid, pidfd: os.NewFile(uintptr(fd), "pidfd:"+strconv.Itoa(pid))}
	stat, err := process.ReadStat(pid)
	if errors.Is(err, process.ErrGone) && p.Signal(0) == nil { // it is /proc that is not there
		err = errors.New(err.Error())
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open process %d: %w", pid, err), p.Close())
	}
	p.StartTime = stat.StartTime
	return p, nil
}

// Signal sends a signal to the process; os.ErrProcessDone if it has ended.
func (p *Process) Signal(sig syscall.Signal) error {
	if p.pidfd == nil {
		return os.ErrProcessDone
	}
	var sent error
	err := p.control(func(fd int) { sent = unix.PidfdSendSignal(fd, sig, nil, 0) })
	if errors.Is(sent, unix.ESRCH) {
		return os.ErrProcessDone
	}
	return errors.Join(err, sent)
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
	if p.pidfd == nil {
		return nil
	}
	raw, err := p.pidfd.SyscallConn()
	if err != nil {
		return err
	}
	return raw.Read(func(fd uintptr) bool { return process.HasEnded(int(fd)) })
}

// Wait waits until a process of ours is reaped, and returns its exit status.
func (p *Process) Wait() (status syscall.WaitStatus, known bool) {
	if p.child == nil {
		return 0, false
	}
	return p.child.Wait(), true
}

// copyPidfd is a further descriptor of the process's pidfd.
func (p *Process) copyPidfd() (*os.File, error) {
	if p.pidfd == nil {
		return nil, os.ErrProcessDone
	}
	var fd int
	var copied error
	err := p.control(func(pidfd int) { fd, copied = unix.FcntlInt(uintptr(pidfd), unix.F_DUPFD_CLOEXEC, 0) })
	if err = errors.Join(err, copied); err != nil {
		return nil, fmt.Errorf("copy the pidfd of process %d: %w", p.PID, os.NewSyscallError("fcntl", err))
	}
	return os.NewFile(uintptr(fd), p.pidfd.Name()), nil
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
	if p.pidfd != nil {
		_ = p.control(func(fd int) { status, known = exitInfo(fd) })
	}
	return status, known
}

// Close releases what is held for the process, which lives on if it has not
// ended.
func (p *Process) Close() error {
	if p.group != nil {
		p.group.Close()
	}
	if p.pidfd == nil {
		return nil
	}
	return p.pidfd.Close()
}

func (p *Process) control(do func(pidfd int)) error {
	raw, err := p.pidfd.SyscallConn()
	if err != nil {
		return err
	}
	return raw.Control(func(fd uintptr) { do(int(fd)) })
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
