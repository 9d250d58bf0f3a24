// Package process watches and ends processes that may not be children of the daemon: those that
// an earlier daemon started, and those whose parent ended. Parent reaps for a supervisor. Seal keeps programs in
// memory that nobody can change. OnDisposableThread is for threads that are thrown away.
//
// A Process is a pidfd (pidfd_open(2)) and the facts that name a process for good, its pid and
// its start time: the kernel reuses pids. A Process has one owner, which closes it. The only
// global state are the children that Claim keeps from ReapOrphans.
package process

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// ErrGone means that there is no such process, or that the pid is another one's by now.
var ErrGone = errors.New("the process is gone")

// Facts name a process until the machine reboots.
type Facts struct {
	PID       int    `json:"pid"`
	StartTime uint64 `json:"start_time"` // in clock ticks since boot (proc_pid_stat(5), field 22)
}

// Process is a process that runs, or has just ended.
type Process struct {
	Facts
	pidfd *os.File // readable when the process has ended
}

// Open finds the running process that the facts name. The caller closes it.
func Open(facts Facts) (*Process, error) {
	p, err := Find(facts.PID)
	if err != nil {
		return nil, err
	}
	if p.Facts != facts || p.Ended() { // its state is Z also if only its first thread has ended
		return nil, errors.Join(fmt.Errorf("process %d: %w", facts.PID, ErrGone), p.Close())
	}
	return p, nil
}

// Find finds the process that has a pid now, even a zombie. The caller closes it.
func Find(pid int) (*Process, error) {
	if pid < 1 {
		return nil, fmt.Errorf("process %d: %w", pid, ErrGone)
	}
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) { // EINVAL: no pid of a process
		return nil, fmt.Errorf("process %d: %w: %w", pid, ErrGone, err)
	}
	if err != nil {
		return nil, fmt.Errorf("open process %d: %w", pid, os.NewSyscallError("pidfd_open", err))
	}
	p := &Process{Facts: Facts{PID: pid}, pidfd: os.NewFile(uintptr(fd), "pidfd:"+strconv.Itoa(pid))}
	// After the pidfd was opened, the start time tells if the pid has changed its owner.
	stat, err := ReadStat(pid)
	if errors.Is(err, ErrGone) && p.Signal(0) == nil { // /proc is missing
		err = errors.New(err.Error())
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open process %d: %w", pid, err), p.Close())
	}
	p.StartTime = stat.StartTime
	return p, nil
}

// Signal sends a signal to the process; os.ErrProcessDone if it has ended.
func (p *Process) Signal(signal unix.Signal) error {
	var sent error
	err := p.Control(func(pidfd int) { sent = unix.PidfdSendSignal(pidfd, signal, nil, 0) })
	if errors.Is(sent, unix.ESRCH) {
		return os.ErrProcessDone
	}
	return errors.Join(err, sent)
}

// Pidfd duplicates the pidfd of the process.
func (p *Process) Pidfd() (*os.File, error) {
	var fd int
	var copied error
	err := p.Control(func(pidfd int) { fd, copied = unix.FcntlInt(uintptr(pidfd), unix.F_DUPFD_CLOEXEC, 0) })
	if err = errors.Join(err, copied); err != nil {
		return nil, fmt.Errorf("copy the pidfd of process %d: %w", p.PID, err)
	}
	return os.NewFile(uintptr(fd), p.pidfd.Name()), nil
}

// Control calls do with the pidfd, which stays open until it returns.
func (p *Process) Control(do func(pidfd int)) error {
	connection, err := p.pidfd.SyscallConn()
	if err != nil {
		return err
	}
	return connection.Control(func(fd uintptr) { do(int(fd)) })
}

// Close closes the pidfd and ends a Wait.
func (p *Process) Close() error { return p.pidfd.Close() }

// Wait returns nil at the end of the process, or an error when it is closed. It parks no thread.
func (p *Process) Wait() error {
	connection, err := p.pidfd.SyscallConn()
	if err != nil {
		return err
	}
	err = connection.Read(func(fd uintptr) bool { return ended(int(fd), 0) })
	const between = 100 * time.Millisecond // two looks; a node without room has many such processes
	// It is closed, or the poller had no room for it (epoll_ctl(2): ENOMEM, ENOSPC).
	for ; err != nil; time.Sleep(between) {
		is := false
		if closed := p.Control(func(pidfd int) { is = ended(pidfd, 0) }); closed != nil || is {
			return closed
		}
	}
	return nil
}

// Ended reports whether the process has ended.
func (p *Process) Ended() (is bool) {
	err := p.Control(func(pidfd int) { is = HasEnded(pidfd) })
	return is || err != nil
}

// HasEnded reports whether the process of a pidfd has ended.
func HasEnded(pidfd int) bool { return ended(pidfd, 0) }

// ended polls the pidfd up to the limit. A signal interrupts poll(2), even with SA_RESTART, and this
// process gets many: SIGCHLD, and those by which the Go runtime preempts its threads.
func ended(fd int, limit time.Duration) bool {
	poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for deadline := time.Now().Add(limit); ; {
		n, err := unix.Poll(poll, int(max(0, time.Until(deadline)).Milliseconds()))
		if !errors.Is(err, unix.EINTR) {
			return err == nil && n > 0
		}
	}
}

// KernelExit is the status of a process that has been reaped, as Linux 6.15 tells it by a pidfd that was open.
func (p *Process) KernelExit() (status unix.WaitStatus, known bool) {
	info := unix.PidfdInfo{Mask: unix.PIDFD_INFO_EXIT}
	_ = p.Control(func(pidfd int) {
		known = unix.IoctlPidfdInfo(pidfd, &info) == nil && info.Mask&unix.PIDFD_INFO_EXIT != 0
	})
	return unix.WaitStatus(info.Exit_code), known
}

// Doomed reports whether a process was killed and yet has threads, which sleep uninterruptibly in the kernel, as for
// the server of a file system that does not answer. None of them executes another instruction of its program, but the
// process keeps its locks and sockets until they wake up.
func Doomed(pid int) bool {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	if err != nil || len(threads) == 0 {
		return false
	}
	for _, thread := range threads {
		status, err := os.ReadFile(thread)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			continue // it has ended meanwhile
		}
		if err != nil || !bytes.Contains(status, []byte("\nState:\tZ")) && !isKilled(status) {
			return false
		}
	}
	return true
}

// Doomed is the function of this name for a process that may have ended.
func (p *Process) Doomed() bool { return Doomed(p.PID) }

// isKilled reports whether SIGKILL is pending for the thread of a status, as for each of a process that is killed
// (proc_pid_status(5), SigPnd).
func isKilled(status []byte) bool {
	_, pending, _ := bytes.Cut(status, []byte("\nSigPnd:\t"))
	pending, _, _ = bytes.Cut(pending, []byte("\n"))
	mask, err := strconv.ParseUint(string(pending), 16, 64)
	return err == nil && mask&(1<<(unix.SIGKILL-1)) != 0
}

// KillLimit is how long killed processes may take to be gone. Only an uninterruptible sleep takes longer.
const KillLimit = 3 * time.Second

// AwaitKilled calls done until it reports true, up to KillLimit.
func AwaitKilled(done func() bool) {
	for deadline := time.Now().Add(KillLimit); !done() && time.Now().Before(deadline); {
		time.Sleep(500 * time.Microsecond)
	}
}

// Kill sends SIGKILL and waits for the end, up to the limit. It reaps our own or adopted child.
func (p *Process) Kill(limit time.Duration) error {
	if err := p.Signal(unix.SIGKILL); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	var is bool
	if err := p.Control(func(pidfd int) { is = ended(pidfd, limit) }); err != nil {
		return err
	}
	if !is {
		return fmt.Errorf("process %d still runs %v after SIGKILL", p.PID, limit)
	}
	p.Reap()
	return nil
}

// SignalListed signals those of pids that list still returns after they are opened, and returns them: a pid that was listed once
// may be another process's by the time of kill(2), of the node too, and a container can have its pids reused. A pid of
// another pid namespace is listed as 0.
func SignalListed(pids []int, list func() ([]int, error), signal unix.Signal) (sent []int, err error) {
	const most = 256 // descriptors at a time
	for some := range slices.Chunk(pids, most) {
		opened := make(map[int]int, len(some))
		for _, pid := range some {
			if fd, err := unix.PidfdOpen(pid, 0); err == nil {
				opened[pid] = fd
			}
		}
		again, listErr := list()
		for _, pid := range again {
			if fd, found := opened[pid]; found && unix.PidfdSendSignal(fd, signal, nil, 0) == nil {
				sent = append(sent, pid)
			}
		}
		for _, fd := range opened {
			_ = unix.Close(fd)
		}
		err = errors.Join(err, listErr)
	}
	return sent, err
}

// Reap takes the exit status of an ended process if it is our child.
func (p *Process) Reap() {
	_ = p.Control(func(pidfd int) {
		_ = unix.Waitid(unix.P_PIDFD, pidfd, nil, unix.WEXITED|unix.WNOHANG, nil)
	})
}

// Stat is what proc_pid_stat(5) says of a process.
type Stat struct {
	State     byte
	Parent    int
	StartTime uint64
	// Exiting says that it ends or has ended: it loses its namespaces and files before it is dead.
	Exiting  bool
	Executed bool // it has executed a program since it was forked
}

// ReadStat reads the Stat of a process; ErrGone if there is none.
func ReadStat(pid int) (Stat, error) {
	data, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return Stat{}, fmt.Errorf("process %d: %w", pid, ErrGone)
	}
	if err != nil {
		return Stat{}, err
	}
	// The second field is a name in parentheses that may hold anything.
	fields := bytes.Fields(data[bytes.LastIndexByte(data, ')')+1:])
	const state, parent, flags, startTime = 0, 1, 6, 19 // fields 3, 4, 9 and 22 of the file
	const flagExiting, flagNotExecuted = 0x4, 0x40      // PF_EXITING, PF_FORKNOEXEC of include/linux/sched.h
	if len(fields) <= startTime {
		return Stat{}, fmt.Errorf("process %d: unexpected form of its stat file", pid)
	}
	ppid, parentErr := strconv.Atoi(string(fields[parent]))
	start, startErr := strconv.ParseUint(string(fields[startTime]), 10, 64)
	set, flagsErr := strconv.ParseUint(string(fields[flags]), 10, 32)
	if err := errors.Join(parentErr, startErr, flagsErr); err != nil {
		return Stat{}, fmt.Errorf("process %d: %w", pid, err)
	}
	return Stat{
		State: fields[state][0], Parent: ppid, StartTime: start,
		Exiting: set&flagExiting != 0, Executed: set&flagNotExecuted == 0,
	}, nil
}

// LiveThread returns a thread of a process that does not end, the first one if it lives; ErrGone if there is none.
// The first thread may end long before the others, and has no namespaces and no files then.
func LiveThread(pid int) (tid int, err error) {
	stat, err := ReadStat(pid)
	if err != nil || !stat.Exiting {
		return pid, err
	}
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ESRCH) {
		return 0, err
	}
	for _, task := range tasks {
		tid, _ := strconv.Atoi(task.Name())
		if stat, err := ReadStat(tid); err == nil && !stat.Exiting {
			return tid, nil
		}
	}
	return 0, fmt.Errorf("process %d: all of its threads have ended: %w", pid, ErrGone)
}

// Monotonic returns the time since boot, by a clock that nobody sets.
func Monotonic() time.Duration {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) // never fails
	return time.Duration(now.Nano())
}

// BootID names the boot of the node: the machine's (/proc/sys/kernel/random/boot_id), and in a pid
// namespace of a container also the start time of its first process.
func BootID() (string, error) {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	namespace, linkErr := os.Readlink("/proc/self/ns/pid")
	first, statErr := ReadStat(1)
	if err := errors.Join(err, linkErr, statErr); err != nil {
		return "", fmt.Errorf("read the boot id: %w", err)
	}
	id := strings.TrimSpace(string(data))
	if namespace != "pid:[4026531836]" { // the first one (PROC_PID_INIT_INO of linux/proc_ns.h)
		id = fmt.Sprint(id, "+", first.StartTime)
	}
	return id, nil
}

// Said keeps the first 64 KiB of what a program writes, or Max bytes, and drops the rest, so a flood costs no memory.
type Said struct {
	Max  int
	mu   sync.Mutex
	kept []byte
}

// Write takes all of p.
func (s *Said) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.kept = append(s.kept, p[:min(len(p), cmp.Or(s.Max, 64<<10)-len(s.kept))]...)
	return len(p), nil
}

// Bytes returns what is kept.
func (s *Said) Bytes() []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]byte(nil), s.kept...)
}

// String is Bytes as text.
func (s *Said) String() string { return string(s.Bytes()) }

// OnDisposableThread calls do, which leaves its thread in another namespace or cgroup, on a thread that then exits.
func OnDisposableThread(do func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// The main thread never exits. We hold it, so that the next goroutine gets another one.
			done <- OnDisposableThread(do)
			runtime.UnlockOSThread()
			return
		}
		// Without an unlock, the Go runtime ends the thread with the goroutine.
		done <- do()
	}()
	return <-done
}

// Seal copies a program into executable memory, and closes it to all writers with the seals that
// libcontainer asks for. It fails if the machine forbids executable memory (vm.memfd_noexec is 2).
func Seal(name string, program io.Reader) (*os.File, error) {
	const flags = unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate(name, flags|unix.MFD_EXEC)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.3 all memory could be executed
		fd, err = unix.MemfdCreate(name, flags)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: programs in memory may be forbidden: set vm.memfd_noexec to 1 or 0", os.NewSyscallError("memfd_create", err))
	}
	file := os.NewFile(uintptr(fd), name)
	if _, err = io.Copy(file, program); err == nil {
		err = errors.Join(file.Chmod(0o511), addSeals(file, unix.F_SEAL_SEAL|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE))
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

// addSeals adds seals (fcntl(2), F_ADD_SEALS). F_SEAL_WRITE fails with EBUSY while anything holds a page of the
// file, such as the kernel's own reclaim or compaction, for a moment. Each try waits 150 ms in the kernel.
func addSeals(file *os.File, seals int) (err error) {
	const tries, pause = 20, 50 * time.Millisecond
	for range tries {
		_, err = unix.FcntlInt(file.Fd(), unix.F_ADD_SEALS, seals)
		if !errors.Is(err, unix.EBUSY) {
			break
		}
		time.Sleep(pause)
	}
	return os.NewSyscallError("fcntl(F_ADD_SEALS)", err)
}
