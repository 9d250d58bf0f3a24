package runtime

import (
	"os"
	"syscall"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// Runtime makes containers.
type Runtime interface {
	// Create makes a container and brings its init to the exec barrier; hooks
	// get bundle as its directory. After an error nothing is left.
	// errdefs.ErrFailedPrecondition says that init ran and could not get there:
	// the container asks for what it does not have.
	Create(id, bundle string, spec *specs.Spec, streams Streams) (Container, *Process, error)
	// Abort ends a Create that is under way, which then fails.
	Abort(id string) error
	// Load finds a container that an earlier supervisor has made;
	// errdefs.ErrNotFound if there is none. Any other error says nothing of the
	// container: its state cannot be read.
	Load(id string) (Container, error)
	// Discard removes what is left of a container that has ended and cannot be
	// loaded. It may be called again after an error.
	Discard(id string) error
	// Features says what the runtime can do.
	Features() Features
}

// Features are what callers have to know of a runtime.
type Features struct {
	ExecTrees bool // Process.KillTree ends what an exec has started, too
	Adoption  bool // containers outlive the supervisor, and Load finds them
}

// Container is a container of a Runtime.
type Container interface {
	// Start lets init through the exec barrier.
	Start() error
	// Started is called once the program runs, for hooks that wait for it. Its
	// error is a warning.
	Started() error
	// Exec starts a further process. It and what it starts can be ended
	// together, by Process.KillTree.
	Exec(spec *specs.Process, streams Streams) (*Process, error)
	// Update sets resources, those that are named, and oom_score_adj if it is not
	// nil, of all processes: all or with an error none.
	Update(resources *specs.LinuxResources, oomScoreAdj *int) error
	// Delete kills what is left of the container, and removes its cgroups and
	// its state. It may be called again after an error.
	Delete() error
	// Cgroups are the container's cgroups by controller, "" for version 2.
	Cgroups() map[string]string
	// MountLabel is the SELinux label that a stream of its processes has to have, that
	// of its files; "" for none.
	MountLabel() string
	Adopted
}

// Adopted is what is done with a container that an earlier supervisor has made before
// its state is loaded, and after.
type Adopted interface {
	// SignalAll signals every process of the container.
	SignalAll(sig syscall.Signal) error
	// EndExecs ends the execs that an earlier supervisor has left, whose streams
	// have no owner any more, and not what they have put in the background.
	EndExecs() error
	// NotifyOOM sends at each notice of lack of memory, and closes the channel
	// when the cgroup is gone.
	NotifyOOM() (<-chan struct{}, error)
}

// Parent is a Container whose processes have another parent than this process,
// which lives on when a supervisor dies.
type Parent interface {
	// Exit waits until init has ended, and returns its status as the parent has
	// seen it, and when; the zero time if it does not say. Not known is that of a
	// parent that has ended.
	Exit() (status syscall.WaitStatus, at time.Time, known bool)
}

// Aborter is a Container for which its runtime runs further programs, hooks above all.
type Aborter interface {
	// Abort ends them, and a call that waits for them.
	Abort()
	// AbortStart is Abort if a Start that is under way now has not returned by then.
	AbortStart(after time.Duration)
}

// Clearer is a Container of which more can be removed at its end than at Delete alone.
type Clearer interface {
	// Clear removes what only processes need, when there are none any more. What it
	// cannot remove is left to Delete.
	Clear()
}

// StartHooked is a Container whose init may run hooks of its own behind the exec
// barrier, in the container.
type StartHooked interface {
	// StartHooks names them, and says how long they may take together; "" for none.
	StartHooks() (names string, limit time.Duration)
}

// Relay passes on what a process that copies the streams of another cannot see in
// its descriptors. A nil one does nothing.
type Relay struct {
	resized     func(width, height uint32) error
	stdinClosed func()
}

// Resized says that the terminal has another size now.
func (r *Relay) Resized(width, height uint32) error {
	if r == nil {
		return nil
	}
	return r.resized(width, height)
}

// StdinClosed says that no more input will come.
func (r *Relay) StdinClosed() {
	if r != nil {
		r.stdinClosed()
	}
}

// Relayed is a Container whose streams another process copies.
type Relayed interface {
	// Relay is that of init.
	Relay() *Relay
}

// Streams are the standard streams of a process that is started. Those left
// nil are /dev/null; with Terminal all of them are. They are the caller's to
// close.
type Streams struct {
	Stdin, Stdout, Stderr *os.File
	Terminal              bool
}
