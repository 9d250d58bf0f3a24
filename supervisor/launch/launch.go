package launch

import (
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/supervisor/children"
)

// Launcher launches processes.
type Launcher struct {
	children *children.Children
	program  func() (*os.File, error) // made at the first use, as what follows
	mounts   func() (*os.File, error) // the mount namespace that pauses copy
	keyrings func() bool
	filters  filters
}

// New returns a launcher of processes that become children.
func New(children *children.Children) *Launcher {
	return &Launcher{
		children: children,
		program:  sync.OnceValues(openProgram),
		mounts:   sync.OnceValues(makeEmptyMounts),
		keyrings: sync.OnceValue(CanJoinSessionKeyring),
	}
}

// Launched is a process that was launched. Its owner waits for Child, and closes Pidfd.
type Launched struct {
	Child     *children.Child
	Pidfd     *os.File // was opened while the pid could be no other's
	StartTime uint64   // clock ticks since boot (proc_pid_stat(5), field 22)
	// Cgroups are those of a pause, by controller, "" for version 2; nil for an exec.
	Cgroups map[string]string
}

// CanJoinSessionKeyring tries whether processes may have a session keyring of
// their own. Where they may not (no keyrings, seccomp of an outer container, a
// used-up quota), to join one would fail the whole process.
//
// The try leaves the calling thread in a new, empty, anonymous keyring.
func CanJoinSessionKeyring() bool {
	const anonymous = 0
	_, _, errno := unix.RawSyscall(unix.SYS_KEYCTL, unix.KEYCTL_JOIN_SESSION_KEYRING, anonymous, 0)
	return errno == 0
}

// joinKeyring joins the session keyring of a container, which is there if a process of
// it is. It returns whether it does.
func (a *attempt) joinKeyring(id string) bool {
	if !a.launcher.keyrings() {
		return false
	}
	a.keep("join a session keyring", unix.SYS_KEYCTL, unix.KEYCTL_JOIN_SESSION_KEYRING, a.text("_ses."+id))
	return true
}

// write writes a file of the kernel's with one write(2).
func (a *attempt) write(what, path, content string) {
	a.keep(what, unix.SYS_OPENAT, here, a.text(path), unix.O_WRONLY|unix.O_CLOEXEC)
	a.use(what, unix.SYS_WRITE, a.bytes([]byte(content)), uint64(len(content)))
	a.use(what, unix.SYS_CLOSE)
}

// tryWrite is write of what may be refused, or not be there.
func (a *attempt) tryWrite(what, path, content string) {
	a.put(what, mayFail|keep|2<<skipShift, unix.SYS_OPENAT, []uint64{here, a.text(path), unix.O_WRONLY | unix.O_CLOEXEC})
	a.put(what, mayFail|firstKept, unix.SYS_WRITE, []uint64{0, a.bytes([]byte(content)), uint64(len(content))})
	a.use(what, unix.SYS_CLOSE)
}

// setOOMScoreAdj: without CAP_SYS_RESOURCE it cannot be lower than the supervisor's,
// and stays as that is (proc_pid_oom_score_adj(5)).
func (a *attempt) setOOMScoreAdj(adjust *int) {
	if adjust != nil {
		a.tryWrite("set oom_score_adj", "/proc/self/oom_score_adj", fmt.Sprint(*adjust))
	}
}

// endParents ends the helper and the first process, in this order, and leaves the
// process to the supervisor. It waits for their ends: they are in the container's
// cgroup, which nobody could remove before.
func (a *attempt) endParents() {
	for i := len(a.parents) - 1; i >= 0; i-- {
		_ = unix.PidfdSendSignal(int(a.parents[i].Fd()), unix.SIGKILL, nil, 0)
	}
	for deadline := time.Now().Add(parentsLimit); !a.parentsEnded() && time.Now().Before(deadline); {
		time.Sleep(50 * time.Microsecond)
	}
}

// parentsLimit bounds the wait for a helper that was killed: in a frozen cgroup of version 1
// it ends when that is thawed.
const parentsLimit = time.Second

func (a *attempt) parentsEnded() bool {
	return !slices.ContainsFunc(a.parents, func(pidfd *os.File) bool { return !hasEnded(pidfd) })
}

func hasEnded(pidfd *os.File) bool { return process.HasEnded(int(pidfd.Fd())) }
