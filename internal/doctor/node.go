package doctor

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/docker/go-units"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/errtext"
	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/network"
	"github.com/minicri/minicri/sandbox"
	"github.com/minicri/minicri/supervisor/client"
)

// kernel checks its version and features, and our privileges.
func (c *checker) kernel() {
	var name unix.Utsname
	_ = unix.Uname(&name) // fails for a bad address alone
	release := unix.ByteSliceToString(name.Release[:])
	var major, minor int
	_, _ = fmt.Sscanf(release, "%d.%d", &major, &minor) // 0.0 when it has another form
	c.when(major > 5 || major == 5 && minor >= 10, Problem, "kernel", "Linux "+release,
		"Linux "+release+" is older than 5.10", "run a newer kernel: pidfds and mount calls are missing in this one")
	for _, f := range machine.Features(c.Config.Root) {
		grade := Warning
		if f.Required {
			grade = Problem
		}
		err := f.Probe()
		c.when(err == nil, grade, f.Name, "there", fmt.Sprintf("not there: %v", err), fmt.Sprintf("%s; it came with Linux %s", f.Without, f.Since))
	}
	forwards, _ := os.ReadFile("/proc/sys/net/ipv4/ip_forward")
	c.when(strings.TrimSpace(string(forwards)) == "1", Warning, "forwarding", "on",
		"off in this network namespace", "sysctl -w net.ipv4.ip_forward=1, unless the network plugin does so")
	c.when(os.Geteuid() == 0, Problem, "user", "root", "not root", "the daemon has to be root")
	m, err := machine.Read(c.Config.Root)
	if c.failed("capabilities", err) {
		return
	}
	if m.SELinux {
		c.when(m.SELinuxProblem == "", Problem, "SELinux", "its policy knows containers", m.SELinuxProblem, "or boot with selinux=0")
	}
	c.when(m.CanLowerOOMAdj, Warning, "CAP_SYS_RESOURCE", "there",
		fmt.Sprintf("not there: no process gets an oom_score_adj below %d", m.OOMScoreAdj), "pods run, less protected from the OOM killer")
	hierarchies, err := cgroup.FindHierarchies()
	if c.failed("cgroups", err) {
		return
	}
	version := 1
	if m.CgroupV2 {
		version = 2
	}
	c.add("cgroups", Good, fmt.Sprintf("v%d, %d hierarchies", version, len(hierarchies)), "")
	for _, controller := range []string{"cpu", "memory", "pids", "cpuset"} {
		if !slices.Contains(m.Controllers, controller) {
			c.add("cgroups", Warning, "no controller "+controller, "limits of that kind are not enforced: enable it at boot")
		}
	}
}

// Less free space than the first two is a problem; the last is the default of the kubelet's evictions.
const (
	leastBytes    = 64 << 20
	leastInodes   = 1024
	scarcePercent = 5
)

func (c *checker) fileSystem(key, path string) {
	var found unix.Statfs_t
	err := unix.Statfs(path, &found)
	for errors.Is(err, fs.ErrNotExist) && path != "/" { // made by the daemon
		path = filepath.Dir(path)
		err = unix.Statfs(path, &found)
	}
	if err != nil {
		c.problem(key, fmt.Sprintf("%s: %v", path, err), "repair the disk, or set "+key+" to another directory")
		return
	}
	if found.Flags&unix.ST_RDONLY != 0 {
		c.problem(key, path+" is mounted read-only, or its disk has failed", "repair the disk ('dmesg' says what failed), and mount it for writing")
		return
	}
	if name := noLayers[found.Type]; name != "" && key == "root" {
		c.problem(key, fmt.Sprintf("%s is on %s, on which the kernel mounts no layers of containers", path, name),
			"mount a disk or a volume there, of ext4 or xfs, or set root to a directory of one")
	}
	size := uint64(found.Bsize)
	c.free(key, path, "", found.Bavail*size, found.Blocks*size, leastBytes, func(n uint64) string { return units.BytesSize(float64(n)) })
	if found.Files > 0 { // btrfs has no number of inodes
		c.free(key, path, " inodes", found.Ffree, found.Files, leastInodes, func(n uint64) string { return fmt.Sprint(n) })
	}
}

// noLayers are file systems that cannot hold an overlay's upper directory.
var noLayers = map[int64]string{unix.OVERLAYFS_SUPER_MAGIC: "an overlay", unix.NFS_SUPER_MAGIC: "NFS", unix.MSDOS_SUPER_MAGIC: "FAT"}

func (c *checker) free(key, path, what string, free, all, least uint64, show func(uint64) string) {
	message := fmt.Sprintf("%s of %s%s are free in the file system of %s", show(free), show(all), what, path)
	advice := "remove what is not needed: 'minicri image ls' lists images; the kubelet evicts pods"
	switch {
	case free < least:
		c.problem(key, message+": neither a pod nor an image fits", advice)
	case free < all/100*scarcePercent:
		c.add(key, Warning, message, advice)
	default:
		c.add(key, Good, message, "")
	}
}

func (c *checker) programs(ctx context.Context) {
	_, err := os.Stat(c.Shim)
	c.when(err == nil, Problem, "shim", c.Shim, fmt.Sprint(err), "run 'make install', or give --shim")
	// The daemon's own view is a condition of its status.
	for _, h := range c.Handlers.List(ctx) {
		switch {
		case h.Err != nil:
			c.problem("handler", errtext.Of(h.Err), "install the runtime, or remove the handler from the configuration")
		case len(h.Runtime) > 0:
			c.add("handler", Good, fmt.Sprintf("%s runs %v", h.Name, h.Runtime), "")
		}
	}
	for _, problem := range c.Plugins {
		c.problem("NRI plugin", problem.Error(), "correct, start or remove it; docs/nri.md")
	}
	for _, problem := range c.Registries {
		c.add("registries", Warning, problem.Error(), "correct the file: it is read at each pull")
	}
	for _, pair := range [][2]string{{c.Config.Streaming.TLSCert, c.Config.Streaming.TLSKey}, {c.Config.MetricsCert, c.Config.MetricsKey}} {
		found, err := tls.LoadX509KeyPair(pair[0], pair[1]) // one that cannot be read is a problem of the configuration
		if err == nil && time.Now().After(found.Leaf.NotAfter) {
			c.add("certificate", Warning, fmt.Sprintf("%s has expired, %v: clients refuse it", pair[0], found.Leaf.NotAfter), "replace the files: they are read for each connection")
		}
	}
	c.daemon()
}

// networks reads the configuration directories as the daemon does.
func (c *checker) networks() {
	found := c.survey("network", c.Config.CNIConf)
	switch {
	case found:
	case c.Config.DefaultNetwork.Enabled:
		configuration, problems := network.DefaultNetwork(c.Config.DefaultNetwork).Survey(c.Config.BinDirs())
		c.network("network", configuration, problems)
		c.routerRoutes()
	default:
		c.problem("network", "no configuration in "+c.Config.CNIConf, "install a network, or set default_network.enabled")
	}
	for _, path := range c.Config.CNIConfDirs() {
		if path != c.Config.CNIConf && !c.survey("handler network", path) {
			c.problem("handler network", "no configuration in "+path, "install a network there, or remove cni_conf_dir from the handlers that name it")
		}
	}
}

// routerRoutes warns of IPv6 default routes that need another accept_ra beside the embedded network.
func (c *checker) routerRoutes() {
	subnets, err := config.ParseSubnets(cmp.Or(c.Config.DefaultNetwork.Subnet, network.StoredPodCIDR(c.Config.Root)))
	if err != nil {
		return // of the configuration, or the kubelet has not sent it yet
	}
	links, err := network.RouterLinks(subnets)
	c.failed("network", err)
	for _, link := range links {
		c.add("network", Warning, fmt.Sprintf("the IPv6 default route of %s comes from router advertisements, which the kernel ignores "+
			"when the default network switches forwarding on", link),
			fmt.Sprintf("sysctl -w net.ipv6.conf.%s.accept_ra=2, which minicri also sets before the first pod", link))
	}
}

// survey checks one directory, and reports whether it has a network.
func (c *checker) survey(subject, path string) bool {
	configuration, problems := network.Survey(path, c.Config.BinDirs())
	return c.network(subject, configuration, problems)
}

func (c *checker) network(subject string, configuration *network.Configuration, problems []error) bool {
	previous := false
	for _, problem := range problems {
		message := problem.Error()
		if c.Daemon != nil {
			of := func(said string) bool { return strings.HasPrefix(said, message) }
			if i := slices.IndexFunc(c.Daemon.Networks, of); i >= 0 {
				message, previous = c.Daemon.Networks[i], previous || c.Daemon.Networks[i] != message
			}
		}
		c.problem(subject, message, "correct or remove it")
	}
	if configuration == nil {
		return previous // the daemon has a network, which the file no longer has
	}
	c.add(subject, Good, fmt.Sprintf("%q from %s, plugins %v", configuration.Name, cmp.Or(configuration.File, "default_network"), configuration.Plugins), "")
	if slices.Contains(configuration.Plugins, "portmap") || slices.Contains(configuration.Plugins, "firewall") {
		_, iptables := exec.LookPath("iptables") // they masquerade, and forward host ports, by these programs
		_, nft := exec.LookPath("nft")
		c.when(iptables == nil || nft == nil, Problem, "packet filter", "iptables or nft is there",
			"neither iptables nor nft is there", "apt-get install nftables iptables")
	}
	return true
}

func (c *checker) daemon() {
	switch {
	case c.Daemon == nil:
		c.add("daemon", Warning, "does not serve "+c.Config.Socket, "start it: systemctl start minicri")
		return
	case errors.Is(c.Daemon.Err, fs.ErrPermission):
		c.problem("daemon", c.Daemon.Err.Error(), "")
		return
	case c.Daemon.Err != nil:
		c.problem("daemon", c.Config.Socket+" takes connections, and there is no status of the daemon: "+c.Daemon.Err.Error(), "read its log: journalctl -u minicri")
		return
	}
	c.add("daemon", Good, "serves "+c.Config.Socket, "")
	for _, dir := range []string{c.recordDir(), c.factsDir(), c.containerDir(), c.containerFactsDir(), c.attachmentDir(), c.shimsDir()} {
		if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
			c.problem("daemon", dir+" was removed, and no pod or container is made without it", "restart the daemon, which makes it: systemctl restart minicri")
		}
	}
	advice := map[string]string{
		"NetworkReady":        "until then the kubelet runs no pod but those of the node's network: docs/troubleshooting.md",
		"RuntimeHandlerReady": "install what is missing, or remove the handler from the configuration",
		"CadvisorReady":       "stop the other runtime and restart minicri, or set containerd_socket = ''; docs/agents.md",
		"OlderBuildsServed":   "install the version that is named, and remove these pods before the next upgrade",
	}
	for _, condition := range c.Daemon.Conditions {
		kind, _, _ := strings.Cut(condition.Type, "/")
		if condition.Holds && condition.Message != "" {
			c.add(condition.Type, Warning, condition.Message, "pods run, but not all of what they need works")
			continue
		}
		grade := Problem
		if condition.Type == "CadvisorReady" { // pods run, and a dashboard lacks them
			grade = Warning
		}
		c.when(condition.Holds, grade, condition.Type, "reported by the daemon", cmp.Or(condition.Message, "the daemon does not report it"),
			cmp.Or(advice[kind], "until then pods do not run as they ask for"))
	}
	for _, d := range c.Daemon.Drifted {
		c.problem("attachment", fmt.Sprintf("%s is not as ADD left it: %s", c.pod(d.ID), d.Error), "repair it and let CHECK run again, 'kill -USR1 $(pidof minicri)'; or remove the pod, which is made again")
	}
	for _, key := range c.Daemon.Orphans {
		c.problem("leak", "snapshot "+key+" has no container", "restart the daemon, which removes it")
	}
}

// supervisors shows those of other builds than the daemon would start.
func (c *checker) supervisors() {
	build, err := client.BuildOf(c.Shim)
	if err != nil {
		return // programs has said so
	}
	pods := make(map[string]int)
	for _, id := range c.ids("supervisors", c.recordDir()) {
		if record, err := state.Peek[sandbox.Record](c.recordDir(), id); err == nil { // else quarantine says so
			pods[record.Supervisor]++
		}
	}
	older, err := client.Older(c.shimsDir(), build, pods)
	c.failed("supervisors", err)
	for _, one := range older {
		message := fmt.Sprintf("build %s, version %s, has %d pods", one.Group, one.Version, one.Pods)
		if one.Problem != "" {
			c.problem("supervisor", message+": "+one.Problem, fmt.Sprintf("install minicri %s again, and remove these pods before the next upgrade", one.Version))
			continue
		}
		c.add("supervisor", Good, message+": it ends with the last of them", "")
	}
}
