package launch

import (
	"bytes"
	"embed"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"

	"github.com/moby/sys/capability"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
)

// Launcher launches processes.
type Launcher struct {
	parent  *process.Parent
	opening sync.Mutex
	program *os.File // nil before the first use
	filters filters
	mounts  mounts
}

// New returns a launcher of processes that become children.
func New(parent *process.Parent) *Launcher {
	return &Launcher{parent: parent}
}

// Launched is a launched process. Its owner waits for Child, and closes Process, which was found before the
// pid could be reused.
type Launched struct {
	Child   *process.Child
	Process *process.Process
	Cgroups map[string]string // of a pause, by controller, "" for version 2; nil for an exec
}

// launch makes an attempt, and ends it.
func (l *Launcher) launch(what string, streams [3]*os.File, do func(a *attempt) error) (made *Launched, err error) {
	a, err := l.newAttempt(streams)
	if err == nil {
		err = do(a)
		made = a.made
		a.end(err)
	}
	if err != nil {
		return nil, fmt.Errorf("launch %s: %w", what, err)
	}
	return made, nil
}

// A session keyring of a container has this name and these permissions, libcontainer's: a new one's, and search by its
// user (keyctl_setperm(3)).
const (
	keyringPrefix = "_ses."
	keyringPerm   = 0x3f130000 | 0x80000
)

// MakeSessionKeyring makes the session keyring of a container, which init then joins by its name, and reports whether
// it could: a kernel without any or an outer seccomp filter forbid it, or the quota of root, which a container can use
// up at any moment. A thread of its own, which ends with the starter, keeps the keyring; it forks nothing, as a child
// that inherits the keyring cannot join it.
func MakeSessionKeyring(id, label string) bool {
	made := make(chan error)
	go func() {
		runtime.LockOSThread()
		if label != "" {
			_ = os.WriteFile("/proc/thread-self/attr/keycreate", []byte(label), 0) // as libcontainer's init does
		}
		session, err := unix.KeyctlJoinSessionKeyring(keyringPrefix + id)
		if err == nil {
			err = unix.KeyctlSetperm(session, keyringPerm)
		}
		made <- err
		select {}
	}()
	return <-made == nil
}

// joinKeyring joins, or makes, the session keyring of a container, and then skips calls. Where that cannot be, see
// MakeSessionKeyring, the process keeps the supervisor's, and the calls are made.
func (a *attempt) joinKeyring(id string, skip uint64) {
	a.put("join a session keyring", mayFail|skip<<skipShift, unix.SYS_KEYCTL, unix.KEYCTL_JOIN_SESSION_KEYRING, a.text(keyringPrefix+id))
}

// write writes a file of the kernel with one write(2). The flags are 0 or mayFail.
func (a *attempt) write(what, path, content string, flags uint64) {
	a.put(what, flags|keep, unix.SYS_OPENAT, here, a.text(path), unix.O_WRONLY|unix.O_CLOEXEC)
	a.put(what, flags|firstKept, unix.SYS_WRITE, 0, a.bytes([]byte(content)), uint64(len(content)))
	a.put(what, flags|firstKept, unix.SYS_CLOSE)
}

// setOOMScoreAdj ignores errors: a low value needs CAP_SYS_RESOURCE (proc_pid_oom_score_adj(5)).
func (a *attempt) setOOMScoreAdj(adjust *int) {
	if adjust != nil {
		a.write("set oom_score_adj", "/proc/self/oom_score_adj", fmt.Sprint(*adjust), mayFail)
	}
}

// name is the comm of a process before it executes its program (proc_pid_comm(5)). Others can have it, too.
const name = "minicri-launch"

// The pattern also matches launch.c: the package compiles without launch.elf.
//
//go:embed launch.*
var files embed.FS

// open returns the program launch in sealed memory, where the first that succeeds has put it.
func (l *Launcher) open() (*os.File, error) {
	l.opening.Lock()
	defer l.opening.Unlock()
	if l.program != nil {
		return l.program, nil
	}
	elf, err := files.ReadFile("launch.elf")
	if err != nil {
		return nil, fmt.Errorf("the program launch is not built in, run `make build`: %w", err)
	}
	l.program, err = process.Seal(name, bytes.NewReader(elf))
	return l.program, err
}

// filter is what seccomp(2) loads; the program is nil for none.
type filter struct {
	program []byte
	flags   uint64
}

// filters caches compiled seccomp profiles: most containers of a node share a few.
type filters struct {
	mu       sync.Mutex
	compiled map[string]filter // by profile
}

// of returns the filter of a profile.
func (f *filters) of(profile *specs.LinuxSeccomp) (filter, error) {
	if profile == nil || profile.DefaultAction == "" && len(profile.Syscalls) == 0 {
		return filter{}, nil
	}
	key, err := json.Marshal(profile)
	if err != nil {
		return filter{}, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if made, ok := f.compiled[string(key)]; ok {
		return made, nil
	}
	made, err := compile(profile)
	if err != nil {
		return filter{}, err
	}
	const maxFilters = 16
	if f.compiled == nil || len(f.compiled) == maxFilters {
		f.compiled = make(map[string]filter)
	}
	f.compiled[string(key)] = made
	return made, nil
}

// hasOwnMounts reports whether there is a mount namespace, and no namespace of an unknown kind.
func hasOwnMounts(namespaces []specs.LinuxNamespace) (mounts bool) {
	for _, n := range namespaces {
		if namespaceFlags[n.Type] == 0 {
			return false
		}
		mounts = mounts || n.Type == specs.MountNamespace
	}
	return mounts
}

// enterCgroups puts the process that goes on with the list into cgroups, by controller. It avoids the kernel's global
// lock for moves (cgroup_procs_write_start of kernel/cgroup/cgroup.c), which costs milliseconds: a thread that moves
// itself (version 1) and a process born in its cgroup (version 2) do not take it.
func (a *attempt) enterCgroups(cgroups map[string]string) error {
	for _, controller := range slices.Sorted(maps.Keys(cgroups)) {
		if controller != "" {
			a.write("enter the cgroup "+cgroups[controller], cgroups[controller]+"/tasks", "0", 0)
		}
	}
	unified, ok := cgroups[""]
	if !ok {
		return nil
	}
	dir, err := a.give(os.OpenFile(unified, unix.O_PATH|unix.O_DIRECTORY, 0))
	if err != nil {
		return err
	}
	// struct clone_args: flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size,
	// tls, set_tid, set_tid_size, cgroup.
	args := a.numbers(unix.CLONE_INTO_CGROUP, 0, 0, 0, uint64(unix.SIGCHLD), 0, 0, 0, 0, 0, dir)
	a.put("enter the cgroup "+unified, forks, unix.SYS_CLONE3, args, 11*8)
	return nil
}

// namespaceFlags are those of setns(2) and clone(2).
var namespaceFlags = map[specs.LinuxNamespaceType]uint64{
	specs.MountNamespace: unix.CLONE_NEWNS, specs.UTSNamespace: unix.CLONE_NEWUTS, specs.IPCNamespace: unix.CLONE_NEWIPC,
	specs.NetworkNamespace: unix.CLONE_NEWNET, specs.PIDNamespace: unix.CLONE_NEWPID, specs.CgroupNamespace: unix.CLONE_NEWCGROUP,
}

// forkLast forks the launched process, in new namespaces and a new session.
func (a *attempt) forkLast(namespaces uint64) {
	a.put("fork", forks|isLast, unix.SYS_CLONE, namespaces|uint64(unix.SIGCHLD))
	a.add("lead a session", unix.SYS_SETSID)
	all := slices.Repeat([]byte{0xff}, 8192/8) // CONFIG_NR_CPUS
	// From here on the cgroup's cpuset decides, not the supervisor's affinity.
	a.put("reset the CPU affinity", mayFail, unix.SYS_SCHED_SETAFFINITY, 0, uint64(len(all)), a.bytes(all))
	a.add("set the umask", unix.SYS_UMASK, 0o022)
}

// becomeUser switches to the user, with these capabilities.
func (a *attempt) becomeUser(u specs.User, caps *specs.LinuxCapabilities) error {
	last, err := capability.LastCap()
	if err != nil {
		return err
	}
	bounding := capSet(caps.Bounding, last)
	for c := range last + 1 {
		if bounding&(1<<c) == 0 {
			a.add("drop "+c.String()+" for good", unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, uint64(c))
		}
	}
	a.add("keep capabilities", unix.SYS_PRCTL, unix.PR_SET_KEEPCAPS, 1)
	groups, _ := binary.Append(nil, binary.NativeEndian, u.AdditionalGids) // fixed size
	a.add("set the groups", unix.SYS_SETGROUPS, uint64(len(u.AdditionalGids)), a.bytes(groups))
	a.add("set the group", unix.SYS_SETGID, uint64(u.GID))
	a.add("set the user", unix.SYS_SETUID, uint64(u.UID))
	a.add("keep capabilities no longer", unix.SYS_PRCTL, unix.PR_SET_KEEPCAPS, 0)
	sets := []uint64{capSet(caps.Effective, last), capSet(caps.Permitted, last), capSet(caps.Inheritable, last)}
	var data []byte // struct __user_cap_data_struct, low halves first (capset(2))
	for _, shift := range []int{0, 32} {
		for _, set := range sets {
			data = binary.NativeEndian.AppendUint32(data, uint32(set>>shift))
		}
	}
	itself := a.numbers(unix.LINUX_CAPABILITY_VERSION_3)
	a.add("set the capabilities", unix.SYS_CAPSET, itself, a.bytes(data))
	a.add("drop the ambient capabilities", unix.SYS_PRCTL, unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL)
	ambient := capSet(caps.Ambient, last)
	for c := range last + 1 {
		if ambient&(1<<c) != 0 {
			a.put("raise "+c.String(), mayFail, unix.SYS_PRCTL, unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_RAISE, uint64(c))
		}
	}
	return nil
}

// capSet returns a set of named capabilities, without those that this kernel does not have.
func capSet(names []string, last capability.Cap) (set uint64) {
	for c := range last + 1 {
		if slices.Contains(names, "CAP_"+strings.ToUpper(c.String())) {
			set |= 1 << c
		}
	}
	return set
}

func (a *attempt) loadFilter(f filter) {
	if f.program != nil {
		program := a.numbers(uint64(len(f.program)/unix.SizeofSockFilter), a.bytes(f.program))
		a.add("load the seccomp filter", unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, f.flags, program)
	}
}
