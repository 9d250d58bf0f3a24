// Package machine knows what this machine can do: features of its kernel, capabilities of the daemon, cgroup
// controllers, SELinux, and AppArmor, whose default profile the kernel keeps once it is loaded. All this
// lasts until a reboot, so there is no state, and no lock.
package machine

import (
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/moby/sys/capability"
	"github.com/moby/sys/mountinfo"
	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/selinux/go-selinux"
	"github.com/opencontainers/selinux/go-selinux/label"
	"golang.org/x/sys/unix"
)

// Machine is what specs and checks need to know of their machine.
type Machine struct {
	OOMScoreAdj       int // the daemon's; lower needs CAP_SYS_RESOURCE (proc_pid_oom_score_adj(5))
	CanLowerOOMAdj    bool
	AppArmor          bool
	SELinux           bool
	SELinuxProblem    string            `json:",omitempty"` // why SELinux cannot confine containers
	Capabilities      []string          `json:",omitempty"` // the daemon's, sorted; what it starts has no others
	Controllers       []string          `json:",omitempty"` // those of cgroups that can be set, sorted
	CgroupV2          bool              `json:",omitempty"` // version 2 alone
	Swap              bool              `json:",omitempty"` // it is accounted
	CgroupDelegation  bool              `json:",omitempty"` // a cgroup namespace is a boundary (nsdelegate)
	Rlimits           map[string]uint64 `json:",omitempty"` // the daemon's hard limits; nil with CAP_SYS_RESOURCE
	CPUs              uint64            `json:",omitempty"` // the most that the kernel can have; 0 is unknown
	MemoryNodes       uint64            `json:",omitempty"`
	HugepageSizes     []string          `json:",omitempty"` // sorted, as the controller hugetlb writes them ("2MB")
	RecursiveReadOnly bool              `json:",omitempty"`
	UserNamespaces    bool              `json:",omitempty"` // the kernel can map the owners of files; see MapsUsers

	root string
}

// Read asks the kernel. root is a directory in the filesystem of images.
func Read(root string) (Machine, error) {
	text, err := os.ReadFile("/proc/self/oom_score_adj")
	if err != nil {
		return Machine{}, err
	}
	adjust, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return Machine{}, fmt.Errorf("read our own oom_score_adj: %w", err)
	}
	own, err := capability.NewPid2(0)
	if err != nil {
		return Machine{}, err
	}
	if err := own.Load(); err != nil {
		return Machine{}, fmt.Errorf("read our own capabilities: %w", err)
	}
	controllers, err := readControllers()
	if err != nil {
		return Machine{}, fmt.Errorf("find the controllers of cgroups: %w", err)
	}
	m := Machine{
		OOMScoreAdj: adjust, CanLowerOOMAdj: own.Get(capability.EFFECTIVE, capability.CAP_SYS_RESOURCE),
		AppArmor: appArmorSupported(), SELinux: selinux.GetEnabled(), Capabilities: namesOf(own),
		Controllers: controllers, CgroupV2: cgroups.IsCgroup2UnifiedMode(), Swap: accountsSwap(),
		CgroupDelegation:  delegates(),
		CPUs:              count("/sys/devices/system/cpu/possible"),
		MemoryNodes:       memoryNodes("/sys/devices/system/node/possible"),
		HugepageSizes:     slices.Sorted(slices.Values(cgroups.HugePageSizes())),
		RecursiveReadOnly: probeRecursiveReadOnly() == nil,
		UserNamespaces:    probeUserNamespaces(root) == nil,
		root:              root,
	}
	if m.SELinux {
		if err := checkSELinuxPolicy(); err != nil {
			m.SELinuxProblem = err.Error()
		}
	}
	if !m.CanLowerOOMAdj {
		m.Rlimits = make(map[string]uint64)
		for name, resource := range resources {
			var limit unix.Rlimit
			if err := unix.Getrlimit(resource, &limit); err != nil {
				return Machine{}, fmt.Errorf("read our own %s: %w", name, err)
			}
			m.Rlimits[name] = limit.Max
		}
	}
	return m, nil
}

func namesOf(own capability.Capabilities) (names []string) {
	for _, c := range capability.ListKnown() {
		if own.Get(capability.EFFECTIVE, c) && own.Get(capability.BOUNDING, c) {
			names = append(names, "CAP_"+strings.ToUpper(c.String()))
		}
	}
	slices.Sort(names)
	return names
}

// IsCapability reports whether there is a capability of that name, here or on another machine.
func IsCapability(name string) bool {
	return slices.ContainsFunc(capability.ListKnown(), func(c capability.Cap) bool { return "CAP_"+strings.ToUpper(c.String()) == name })
}

// OOMScoreAdjNear returns the nearest value that a process may have here.
func (m Machine) OOMScoreAdjNear(wanted int) int {
	if m.CanLowerOOMAdj {
		return wanted
	}
	return max(wanted, m.OOMScoreAdj)
}

// Feature is probed by use: distributions add features to older kernels and leave some out of newer ones.
type Feature struct {
	Name     string
	Since    string       // the release of Linux that brought it
	Required bool         // no pod runs without it
	Without  string       // what does not work without it
	Probe    func() error // why it is missing, or nil
}

// Features are in the order of a report. root is a directory in the filesystem of images.
func Features(root string) []Feature {
	return []Feature{
		{"namespaces", "3.8", true, "pods cannot be isolated", probeNamespaces},
		// As a mount does, this loads the module (fsopen(2), Linux 5.2).
		{"overlayfs", "3.18", true, "containers have no root file system: modprobe overlay", func() error { return closed(unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)) }},
		{"pidfd", "5.3", true, "the end of a process cannot be waited for", func() error { return closed(unix.PidfdOpen(os.Getpid(), 0)) }},
		{"programs in memory", "3.17", true, "minicri's own programs run from sealed memory: sysctl -w vm.memfd_noexec=1", probeMemory},
		{"openat2", "5.6", true, "paths in a container's root cannot be resolved safely", func() error {
			return closed(unix.Openat2(unix.AT_FDCWD, "/", &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT}))
		}},
		{"seccomp", "3.17", false, "pods that ask for a seccomp profile do not start", probeSeccomp},
		{"recursive read-only mounts", "5.12", false, "mounts with recursive_read_only are refused", probeRecursiveReadOnly},
		{"user namespaces", "5.19", false, "pods with hostUsers: false are not scheduled here", func() error { return canMapUsers(root) }},
	}
}

func closed(fd int, err error) error {
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

func probeNamespaces() error {
	for _, namespace := range []string{"net", "mnt", "pid", "ipc", "uts", "user"} {
		if _, err := os.Stat("/proc/self/ns/" + namespace); err != nil {
			return fmt.Errorf("the kernel is built without %s namespaces", namespace)
		}
	}
	return nil
}

func probeMemory() error {
	err := closed(unix.MemfdCreate("probe", unix.MFD_CLOEXEC|unix.MFD_EXEC))
	if errors.Is(err, unix.EINVAL) { // before Linux 6.3 all memory can be executed
		return nil
	}
	return err
}

// probeSeccomp passes no filter; a kernel that has filters answers EFAULT (seccomp(2)).
func probeSeccomp() error {
	const setModeFilter = 1
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, setModeFilter, 0, 0)
	if errno == unix.EFAULT || errno == unix.EACCES {
		return nil
	}
	return errno
}

// probeRecursiveReadOnly passes no valid descriptor: EBADF shows that there is the call (mount_setattr(2)).
func probeRecursiveReadOnly() error {
	err := unix.MountSetattr(-1, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY})
	if errors.Is(err, unix.EBADF) {
		return nil
	}
	return err
}

// MapsUsers returns why pods cannot have a user namespace now, or nil. An administrator can open or close a directory
// above root at any time.
func (m Machine) MapsUsers() error {
	if !m.UserNamespaces {
		return errors.New("this machine cannot map the owners of an image's files: see 'minicri check'")
	}
	return passable(m.root)
}

// canMapUsers reports why pods cannot have a user namespace.
func canMapUsers(root string) error { return cmp.Or(probeUserNamespaces(root), passable(root)) }

// passable reports the directory above root through which users of a pod's user namespace cannot pass: they own nothing
// there, and the root file systems of their containers are below root.
func passable(root string) error {
	real, err := filepath.EvalSymlinks(root)
	if err != nil {
		real = root // it is made by the daemon
	}
	for above := filepath.Dir(real); above != "/" && above != "."; above = filepath.Dir(above) {
		if info, err := os.Stat(above); err == nil && info.Mode().Perm()&0o001 == 0 {
			return fmt.Errorf("root: %s is below %s of mode %#o, through which no user of a pod's user namespace can pass: "+
				"chmod o+x %[2]s, or set root to another directory", root, above, info.Mode().Perm())
		}
	}
	return nil
}

// probeUserNamespaces: their limit may be 0 (user_namespaces(7)). Mounts map the owners of an image's files
// (mount_setattr(2), MOUNT_ATTR_IDMAP): on most filesystems, and in overlays since Linux 5.19.
func probeUserNamespaces(root string) error {
	most, err := os.ReadFile("/proc/sys/user/max_user_namespaces")
	if err == nil && strings.TrimSpace(string(most)) == "0" {
		err = errors.New("none are allowed: sysctl -w user.max_user_namespaces=15000")
	}
	if err != nil {
		return err
	}
	var kernel unix.Utsname
	var major, minor int
	err = unix.Uname(&kernel)
	if _, scanErr := fmt.Sscanf(unix.ByteSliceToString(kernel.Release[:]), "%d.%d", &major, &minor); err != nil || scanErr != nil || major < 5 || major == 5 && minor < 19 {
		return fmt.Errorf("overlays have layers with mapped owners since Linux 5.19, this is %d.%d: %w", major, minor, errors.ErrUnsupported)
	}
	for _, err := os.Stat(root); err != nil && root != filepath.Dir(root); _, err = os.Stat(root) {
		root = filepath.Dir(root) // the nearest that is there
	}
	tree, err := unix.OpenTree(unix.AT_FDCWD, root, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return fmt.Errorf("open_tree: %w", err)
	}
	defer unix.Close(tree)
	userns, err := openUserns()
	if err != nil {
		return fmt.Errorf("make a user namespace: %w", err)
	}
	defer userns.Close()
	attributes := &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(userns.Fd())}
	if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, attributes); err != nil {
		return fmt.Errorf("map the owners of files of %s: %w", root, err)
	}
	return nil
}

// openUserns opens a new user namespace. Its process, being traced, stops at its exec, and is killed there.
func openUserns() (_ *os.File, err error) {
	runtime.LockOSThread() // the process is killed with the thread that starts it
	defer runtime.UnlockOSThread()
	mapping := []syscall.SysProcIDMap{{ContainerID: 0, HostID: 65534, Size: 1}}
	process, err := os.StartProcess("/proc/self/exe", []string{"minicri-probe"}, &os.ProcAttr{Sys: &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWUSER, UidMappings: mapping, GidMappings: mapping, Ptrace: true, Pdeathsig: unix.SIGKILL,
	}})
	if err != nil {
		return nil, err
	}
	defer func() {
		killErr := process.Kill()
		_, waitErr := process.Wait()
		err = errors.Join(err, killErr, waitErr)
	}()
	return os.Open(fmt.Sprintf("/proc/%d/ns/user", process.Pid))
}

// count returns the last number of a list such as 0-3, plus one; 0 is unknown.
func count(file string) uint64 {
	list, _ := os.ReadFile(file)
	text := strings.TrimSpace(string(list))
	last, err := strconv.ParseUint(text[strings.LastIndexAny(text, "-,")+1:], 10, 31)
	if err != nil {
		return 0
	}
	return last + 1
}

// memoryNodes: a kernel without NUMA has one node, and no list.
func memoryNodes(file string) uint64 {
	if _, err := os.Stat(file); errors.Is(err, fs.ErrNotExist) {
		return 1
	}
	return count(file)
}

const unifiedRoot = "/sys/fs/cgroup"

// readControllers: on version 1, and in a hybrid tree, those count that are mounted.
func readControllers() ([]string, error) {
	controllers, err := cgroups.GetAllSubsystems()
	if err != nil {
		return nil, err
	}
	slices.Sort(controllers)
	if cgroups.IsCgroup2UnifiedMode() {
		return slices.Compact(controllers), nil
	}
	mounts, err := cgroups.GetCgroupMounts(true)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(controllers, func(controller string) bool {
		return !slices.ContainsFunc(mounts, func(m cgroups.Mount) bool { return slices.Contains(m.Subsystems, controller) })
	}), nil
}

// accountsSwap: not every kernel does. On version 2 all cgroups but the root have the file.
func accountsSwap() bool {
	if cgroups.IsCgroup2UnifiedMode() {
		found, err := filepath.Glob(unifiedRoot + "/*/memory.swap.max")
		return err == nil && len(found) > 0
	}
	memory, err := cgroups.FindCgroupMountpoint("", "memory")
	return err == nil && cgroups.PathExists(filepath.Join(memory, "memory.memsw.limit_in_bytes"))
}

func delegates() bool {
	if !cgroups.IsCgroup2UnifiedMode() {
		return false
	}
	mounts, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(unifiedRoot))
	return err == nil && len(mounts) == 1 && slices.Contains(strings.Split(mounts[0].VFSOptions, ","), "nsdelegate")
}

// resources are those of setrlimit(2), by their names in runtime-spec.
var resources = map[string]int{
	"RLIMIT_AS": unix.RLIMIT_AS, "RLIMIT_CORE": unix.RLIMIT_CORE, "RLIMIT_CPU": unix.RLIMIT_CPU, "RLIMIT_DATA": unix.RLIMIT_DATA,
	"RLIMIT_FSIZE": unix.RLIMIT_FSIZE, "RLIMIT_LOCKS": unix.RLIMIT_LOCKS, "RLIMIT_MEMLOCK": unix.RLIMIT_MEMLOCK,
	"RLIMIT_MSGQUEUE": unix.RLIMIT_MSGQUEUE, "RLIMIT_NICE": unix.RLIMIT_NICE, "RLIMIT_NOFILE": unix.RLIMIT_NOFILE,
	"RLIMIT_NPROC": unix.RLIMIT_NPROC, "RLIMIT_RSS": unix.RLIMIT_RSS, "RLIMIT_RTPRIO": unix.RLIMIT_RTPRIO,
	"RLIMIT_RTTIME": unix.RLIMIT_RTTIME, "RLIMIT_SIGPENDING": unix.RLIMIT_SIGPENDING, "RLIMIT_STACK": unix.RLIMIT_STACK,
}

// RlimitNear returns the nearest hard limit that a process may have here.
func (m Machine) RlimitNear(name string, wanted uint64) uint64 {
	if own, limited := m.Rlimits[name]; limited {
		return min(wanted, own)
	}
	return wanted
}

// DefaultProfile is the name of the default AppArmor profile.
const DefaultProfile = "minicri-default"

// A library for the profile would need text/template, for which the linker keeps every method of
// every type: a tenth of the daemon's memory.
//
//go:embed default.profile
var defaultProfile string

// appArmorSupported needs the parser, too, which many containers that serve as nodes do not have.
func appArmorSupported() bool {
	enabled, err := os.ReadFile("/sys/module/apparmor/parameters/enabled")
	if err != nil || !strings.HasPrefix(string(enabled), "Y") {
		return false
	}
	_, err = exec.LookPath("apparmor_parser")
	return err == nil
}

// LoadDefaultProfile loads the default profile, also for processes that an earlier one confines.
func LoadDefaultProfile(ctx context.Context) error {
	// The cache would be in a directory of the machine.
	command := exec.CommandContext(ctx, "apparmor_parser", "--replace", "--skip-cache")
	profile := strings.NewReplacer("@PROFILE@", DefaultProfile, "@DAEMON@", ownProfile()).Replace(defaultProfile)
	command.Stdin = strings.NewReader(profile)
	if output, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("load the AppArmor profile %s: %v: %w: %s", DefaultProfile, command, err, output)
	}
	return nil
}

// ownProfile returns the profile that confines this process, which sends the signals.
func ownProfile() string {
	current, err := os.ReadFile("/proc/self/attr/apparmor/current")
	if err != nil {
		current, _ = os.ReadFile("/proc/self/attr/current") // before Linux 5.1
	}
	name, _, _ := strings.Cut(strings.TrimSpace(string(current)), " (") // "NAME (enforce)"
	if name == "" {
		return "unconfined"
	}
	return name
}

// checkSELinuxPolicy: the policy must have labels for containers (selinux(8), lxc_contexts), and know them.
func checkSELinuxPolicy() error {
	process, mount := selinux.ContainerLabels()
	if process == "" || mount == "" {
		return errors.New("the policy has no labels for containers: install the package container-selinux")
	}
	defer selinux.ReleaseLabel(process)
	for _, text := range []string{process, mount} {
		if err := selinux.SecurityCheckContext(text); err != nil {
			return fmt.Errorf("the policy does not know the label %s: install the package container-selinux: %w", text, err)
		}
	}
	return nil
}

// NewLabels makes labels with a level of their own, unless an option names it; "" without SELinux.
func (m Machine) NewLabels(options []string) (process, mount string, err error) {
	if !m.SELinux {
		return "", "", nil
	}
	if process, mount, err = label.InitLabels(options); err != nil {
		return "", "", fmt.Errorf("make SELinux labels of %q: %w", options, err)
	}
	return process, mount, nil
}

// ReserveLevel keeps a label's level for its pod over a restart of the daemon.
func (m Machine) ReserveLevel(process string) {
	if m.SELinux {
		selinux.ReserveLabel(process)
	}
}

// ReleaseLevel undoes ReserveLevel and NewLabels.
func (m Machine) ReleaseLevel(process string) {
	if m.SELinux {
		selinux.ReleaseLabel(process)
	}
}

// neverRelabelled are directories whose labels the node itself needs.
var neverRelabelled = []string{
	"/", "/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/lib64", "/media", "/mnt", "/opt", "/proc", "/root", "/run", "/sbin",
	"/srv", "/sys", "/tmp", "/usr", "/usr/bin", "/usr/lib", "/usr/local", "/usr/sbin", "/usr/share", "/var", "/var/lib", "/var/log", "/var/run",
}

// CheckRelabel reports why a path of the node must keep its label.
func CheckRelabel(path string) error {
	if slices.Contains(neverRelabelled, filepath.Clean(path)) {
		return fmt.Errorf("%s is needed by the node with the SELinux labels that it has", path)
	}
	return nil
}

// RelabelForAll labels a directory, and all below it, for all containers, so that they may execute it.
func (m Machine) RelabelForAll(path string) error {
	if !m.SELinux || m.SELinuxProblem != "" {
		return nil
	}
	process, mount := selinux.ContainerLabels()
	defer selinux.ReleaseLabel(process)
	return m.Relabel(path, mount, true)
}

// LabelLayers makes the directory of layers, whose label new files inherit: containers may read, not write.
// The mounts' label is not enough, because what a program maps is checked by the layer's file, too.
func (m Machine) LabelLayers(dir string) error {
	if !m.SELinux || m.SELinuxProblem != "" {
		return nil
	}
	process, _ := selinux.ContainerLabels()
	defer selinux.ReleaseLabel(process)
	//lint:ignore SA1019 nothing else says what the policy calls ro_file
	wanted := selinux.ROFileLabel()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make the directory of layers: %w", err)
	}
	if label, err := selinux.FileLabel(dir); errors.Is(err, unix.ENOTSUP) || err == nil && label == wanted {
		return nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("label layers: %w", err)
	}
	// The directory's label, set last, shows that all is done.
	for _, entry := range entries {
		if err := selinux.Chcon(filepath.Join(dir, entry.Name()), wanted, true); err != nil {
			return fmt.Errorf("label the layer %s: %w", entry.Name(), err)
		}
	}
	if err := selinux.SetFileLabel(dir, wanted); err != nil && !errors.Is(err, unix.ENOTSUP) {
		return fmt.Errorf("label the directory of layers %s: %w", dir, err)
	}
	return nil
}

// Relabel labels a path, and all below it, for a container, or all if shared.
func (m Machine) Relabel(path, mount string, shared bool) error {
	if !m.SELinux || mount == "" {
		return nil
	}
	if err := CheckRelabel(path); err != nil {
		return err
	}
	if err := label.Relabel(path, mount, shared); err != nil && !errors.Is(err, unix.ENOTSUP) {
		return fmt.Errorf("relabel %s: %w", path, err)
	}
	return nil
}
