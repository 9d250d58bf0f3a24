package runtime

import (
	"encoding/binary"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/sys/capability"
	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/configs"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/shim/runtime/launch"
)

// The descriptors of a process that is launched, besides its streams.
const (
	launchFIFO    = launch.Socket + 1 // the exec barrier, opened with O_PATH
	launchProgram = launch.Socket + 2 // closed first, as are those of an exec from here on
	launchMounts  = launch.Socket + 3 // the mount namespace that is copied
	launchTrees   = launch.Socket + 4 // what is mounted there, see trees
)

// here is AT_FDCWD as an argument.
const here = ^uint64(100) + 1

// launchList collects what the process does: the same that libcontainer's init
// does for such a container, in the same order (standard_init_linux.go).
type launchList struct {
	launch.Calls
	id      string
	config  *configs.Config
	process *libcontainer.Process
	filter  []byte            // of seccomp; nil without one
	cgroups map[string]string // of version 1, which the process enters by itself
}

// fill adds all calls, up to the exec.
func (l *launchList) fill() error {
	l.Add("close the program", unix.SYS_CLOSE, launchProgram)
	l.Add("close what is not its own", unix.SYS_CLOSE_RANGE, launchTrees+uint64(len(trees(l.config))), ^uint64(0)>>32, 0)
	l.setOOMScoreAdj()
	l.enterCgroups()
	l.joinNamespaces()
	l.joinKeyring()
	l.mountRoot()
	l.changeRoot()
	l.nameHost()
	l.writeSysctls()
	l.Add("set no_new_privs", unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1)
	if err := l.dropPrivileges(); err != nil {
		return err
	}
	program := l.String(l.process.Args[0])
	l.Add("find "+l.process.Args[0], unix.SYS_FACCESSAT, here, program, unix.X_OK)
	l.loadFilter()
	l.awaitStart()
	environment := []string{"HOME=/"} // libcontainer's, where no /etc/passwd says more
	l.Add("execute "+l.process.Args[0], unix.SYS_EXECVE, program, l.Strings(l.process.Args), l.Strings(environment))
	return nil
}

// write writes a file of the kernel's with one write(2).
func (l *launchList) write(path, content string) {
	l.Keep("open "+path, unix.SYS_OPENAT, here, l.String(path), unix.O_WRONLY|unix.O_CLOEXEC)
	l.Use("write "+strconv.Quote(content)+" to "+path, unix.SYS_WRITE, l.Bytes([]byte(content)), uint64(len(content)))
	l.Use("close "+path, unix.SYS_CLOSE)
}

func (l *launchList) setOOMScoreAdj() {
	if adjust := l.config.OomScoreAdj; adjust != nil {
		l.write("/proc/self/oom_score_adj", strconv.Itoa(*adjust))
	}
}

// enterCgroups: a single thread that moves itself needs no lock of the whole
// kernel, which others have to wait for by RCU (cgroup_procs_write_start of
// kernel/cgroup/cgroup.c): some milliseconds. The affinity is then what the
// cpuset allows, whatever that of the supervisor is.
func (l *launchList) enterCgroups() {
	for _, controller := range slices.Sorted(maps.Keys(l.cgroups)) {
		l.write(l.cgroups[controller]+"/tasks", "0")
	}
	const mostCPUs = 8192 // CONFIG_NR_CPUS
	all := slices.Repeat([]byte{0xff}, mostCPUs/8)
	l.Try("reset the CPU affinity", unix.SYS_SCHED_SETAFFINITY, 0, uint64(len(all)), l.Bytes(all))
}

func (l *launchList) joinNamespaces() {
	path := l.config.Namespaces.PathOf(configs.NEWNET)
	if path == "" {
		return
	}
	l.Keep("open "+path, unix.SYS_OPENAT, here, l.String(path), unix.O_RDONLY|unix.O_CLOEXEC)
	l.Use("join the network namespace "+path, unix.SYS_SETNS, unix.CLONE_NEWNET)
	l.Use("close "+path, unix.SYS_CLOSE)
}

// sessionKeyringPerm is what a new session keyring may be used for (all by its
// possessor but to set attributes; view, read and link by its user), and search by
// its user, as libcontainer sets it (keyctl_setperm(3)).
const sessionKeyringPerm = 0x3f130000 | 0x80000

func (l *launchList) joinKeyring() {
	if l.config.NoNewKeyring {
		return
	}
	l.Keep("join a session keyring", unix.SYS_KEYCTL, unix.KEYCTL_JOIN_SESSION_KEYRING, l.String("_ses."+l.id))
	l.UseSecond("set the permissions of the session keyring", unix.SYS_KEYCTL, unix.KEYCTL_SETPERM, sessionKeyringPerm)
}

// mountRoot: nothing that is mounted here reaches the node. Everything is the
// node's own below the root; there are no links of others to follow.
func (l *launchList) mountRoot() {
	l.Add("join the empty mount namespace", unix.SYS_SETNS, launchMounts, unix.CLONE_NEWNS)
	l.Add("copy it", unix.SYS_UNSHARE, unix.CLONE_NEWNS)
	tree := uint64(launchTrees)
	attach := func(what, target string) {
		l.Add(what, unix.SYS_MOVE_MOUNT, tree, l.String(""), here, l.String(target), unix.MOVE_MOUNT_F_EMPTY_PATH)
		tree++
	}
	attach("mount the root "+l.config.Rootfs, launchedRoot)
	// The tree shares what is mounted in it with the node's, where that is shared, and
	// such a mount cannot become the root.
	l.Add("make the root's mounts slaves of the node's", unix.SYS_MOUNT, 0, l.String(launchedRoot), 0, unix.MS_SLAVE|unix.MS_REC)
	for _, m := range l.config.Mounts {
		target := launchedRoot + m.Destination
		what := "mount " + m.Source + " on " + m.Destination
		if m.Device != "bind" {
			l.Add(what, unix.SYS_MOUNT, l.String(m.Source), l.String(target), l.String(m.Device), uint64(m.Flags), l.String(m.Data))
			continue
		}
		attach(what, target)
		l.Add("set the options of "+m.Destination, unix.SYS_MOUNT, 0, l.String(target), 0, uint64(m.Flags)|unix.MS_BIND|unix.MS_REMOUNT)
	}
	l.Add("close the mounts", unix.SYS_CLOSE_RANGE, launchMounts, tree-1, 0)
}

// changeRoot moves the root over that of the empty mount namespace, which nothing leads
// to from then on: what joins the namespace is in the root, too. pivot_root(2) would look
// at all threads of the node for those that are in the old root, and unmounting that
// would wait for all processors.
func (l *launchList) changeRoot() {
	slash, dot := l.String("/"), l.String(".")
	l.Add("enter the root "+l.config.Rootfs, unix.SYS_CHDIR, l.String(launchedRoot))
	l.Add("move it over the empty one", unix.SYS_MOUNT, dot, slash, 0, unix.MS_MOVE)
	l.Add("change the root", unix.SYS_CHROOT, dot)
	l.Add("enter the new root", unix.SYS_CHDIR, slash)
	l.Add("make the mounts private", unix.SYS_MOUNT, 0, slash, 0, unix.MS_PRIVATE|unix.MS_REC)
	l.Add("make the root read-only", unix.SYS_MOUNT, 0, slash, 0, unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY)
	l.Add("set the umask", unix.SYS_UMASK, 0o022)
}

func (l *launchList) nameHost() {
	if name := l.config.Hostname; name != "" {
		l.Add("set the host name "+name, unix.SYS_SETHOSTNAME, l.String(name), uint64(len(name)))
	}
}

func (l *launchList) writeSysctls() {
	for _, name := range slices.Sorted(maps.Keys(l.config.Sysctl)) {
		l.write("/proc/sys/"+strings.ReplaceAll(name, ".", "/"), l.config.Sysctl[name])
	}
}

// dropPrivileges leaves no capability, and none that could be got again.
func (l *launchList) dropPrivileges() error {
	last, err := capability.LastCap()
	if err != nil {
		return err
	}
	for c := range last + 1 {
		l.Add("drop "+c.String()+" for good", unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, uint64(c))
	}
	l.setUser()
	none := l.Bytes(make([]byte, 24))
	l.Add("drop all capabilities", unix.SYS_CAPSET, l.capHeader(), none)
	l.Add("drop the ambient capabilities", unix.SYS_PRCTL, unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL)
	return nil
}

func (l *launchList) setUser() {
	var groups []byte
	for _, group := range l.process.AdditionalGroups {
		groups = binary.NativeEndian.AppendUint32(groups, uint32(group))
	}
	l.Add("set the groups", unix.SYS_SETGROUPS, uint64(len(l.process.AdditionalGroups)), l.Bytes(groups))
	l.Add("set the group", unix.SYS_SETGID, uint64(l.process.GID))
	l.Add("set the user", unix.SYS_SETUID, uint64(l.process.UID))
}

// capHeader is that of capset(2) for the process itself, which is 0.
func (l *launchList) capHeader() uint64 {
	return l.Bytes(binary.NativeEndian.AppendUint64(nil, unix.LINUX_CAPABILITY_VERSION_3))
}

// loadFilter: as late as can be, so that the filter need not allow what is above.
func (l *launchList) loadFilter() {
	if l.filter == nil {
		return
	}
	program := binary.NativeEndian.AppendUint64(nil, uint64(len(l.filter)/filterInstruction))
	program = binary.NativeEndian.AppendUint64(program, l.Bytes(l.filter))
	l.Add("load the seccomp filter", unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, seccompFlags(l.config.Seccomp), l.Bytes(program))
}

// awaitStart is libcontainer's exec barrier: the start of the container reads
// from the fifo.
func (l *launchList) awaitStart() {
	l.Add("report to the supervisor", unix.SYS_WRITE, launch.Socket, l.String("r"), 1)
	l.Add("close the socket", unix.SYS_CLOSE, launch.Socket)
	l.Keep("open the exec barrier", unix.SYS_OPENAT, here, l.String("/proc/self/fd/"+strconv.Itoa(launchFIFO)), unix.O_WRONLY|unix.O_CLOEXEC)
	l.Use("write to the exec barrier", unix.SYS_WRITE, l.String("0"), 1)
	l.Use("close the exec barrier", unix.SYS_CLOSE)
	l.Add("close the exec barrier", unix.SYS_CLOSE, launchFIFO)
}
