package stats

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/moby/sys/mountinfo"
	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/cgroups/fs"
	"github.com/opencontainers/cgroups/fs2"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// hierarchies are where those of cgroups are mounted: that of version 2, "" without one,
// and those of the controllers that are on version 1, by name.
type hierarchies struct {
	unified string
	v1      map[string]string
}

// onVersion1 are the controllers that are read, by their names on version 1.
func onVersion1() map[string]cgroups.Controller {
	return map[string]cgroups.Controller{
		"cpu": cgroups.CPU, "cpuacct": cgroups.CPU, "memory": cgroups.Memory, "pids": cgroups.Pids, "blkio": cgroups.IO, "hugetlb": cgroups.HugeTLB,
	}
}

// What the statistics need, and the metrics.
const (
	forStats   = cgroups.CPU | cgroups.Memory | cgroups.Pids
	forMetrics = forStats | cgroups.IO | cgroups.HugeTLB
)

func findHierarchies() (hierarchies, error) {
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		return hierarchies{}, fmt.Errorf("find the cgroup hierarchies: %w", err)
	}
	h := hierarchies{v1: make(map[string]string)}
	for _, m := range mounts {
		if m.FSType == "cgroup2" && h.unified == "" {
			h.unified = m.Mountpoint
		}
		for name := range onVersion1() {
			if m.FSType == "cgroup" && h.v1[name] == "" && slices.Contains(strings.Split(m.VFSOptions, ","), name) {
				h.v1[name] = m.Mountpoint
			}
		}
	}
	if h.unified == "" && len(h.v1) == 0 {
		return hierarchies{}, errors.New("no cgroup hierarchy is mounted: mount cgroup2 on /sys/fs/cgroup")
	}
	return h, nil
}

// version2 reports whether a controller is not on version 1, and so on version 2 if
// anywhere.
func (h hierarchies) version2(controller string) bool { return h.v1[controller] == "" }

// dir is a cgroup in the hierarchy of a controller. Cleaned as a rooted path, it never
// leads out.
func (h hierarchies) dir(controller, path string) string {
	hierarchy := h.v1[controller]
	if hierarchy == "" {
		hierarchy = h.unified
	}
	return filepath.Join(hierarchy, filepath.Clean("/"+path))
}

// read measures a cgroup; errdefs.ErrNotFound if it is in no hierarchy. Beside another
// error are the controllers that could be read.
func (h hierarchies) read(path string, wanted cgroups.Controller) (*cgroups.Stats, error) {
	if !h.has(path) {
		return nil, fmt.Errorf("measure cgroup %s: %w", path, errdefs.ErrNotFound)
	}
	paths := make(map[string]string)
	var onV1 cgroups.Controller
	for name := range h.v1 {
		paths[name] = h.dir(name, path)
		onV1 |= onVersion1()[name]
	}
	first, err := fs.NewManager(&cgroups.Cgroup{Resources: &cgroups.Resources{}}, paths)
	if err != nil {
		return nil, err
	}
	second, err := fs2.NewManager(&cgroups.Cgroup{}, h.dir("", path))
	if err != nil {
		return nil, err
	}
	all, errs := cgroups.NewStats(), []error(nil)
	for controller := cgroups.CPU; controller <= cgroups.HugeTLB; controller <<= 1 {
		stats := second.Stats
		switch {
		case wanted&controller == 0:
			continue
		case onV1&controller != 0:
			stats = first.Stats
		}
		part, err := stats(&cgroups.StatsOptions{Controllers: controller})
		errs = append(errs, err)
		keep(all, part, controller)
	}
	if h.unified != "" { // pressure is there on a hybrid machine, too
		part, err := second.Stats(&cgroups.StatsOptions{Controllers: cgroups.CPU | cgroups.Memory | cgroups.IO})
		errs = append(errs, err)
		all.CpuStats.PSI, all.MemoryStats.PSI, all.BlkioStats.PSI = part.CpuStats.PSI, part.MemoryStats.PSI, part.BlkioStats.PSI
	}
	return all, errors.Join(errs...)
}

// has reports whether a hierarchy has the cgroup.
func (h hierarchies) has(path string) bool {
	for _, controller := range []string{"cpuacct", "memory", ""} {
		if _, err := os.Stat(h.dir(controller, path)); err == nil {
			return true
		}
	}
	return false
}

// keep takes one controller's part over, if there is any.
func keep(all, part *cgroups.Stats, controller cgroups.Controller) {
	if part == nil {
		return
	}
	switch controller {
	case cgroups.CPU:
		all.CpuStats = part.CpuStats
	case cgroups.Memory:
		all.MemoryStats = part.MemoryStats
	case cgroups.Pids:
		all.PidsStats = part.PidsStats
	case cgroups.IO:
		all.BlkioStats = part.BlkioStats
	case cgroups.HugeTLB:
		all.HugetlbStats = part.HugetlbStats
	}
}

const (
	// defaultInterface is the one that the pod's addresses are on.
	defaultInterface = "eth0"
	// dumpTries: a dump is interrupted when an interface comes or goes.
	dumpTries = 3
	// netlinkTimeout ends the waiting for a kernel whose lock is held.
	netlinkTimeout = time.Second
)

// readNetwork reads the counters of all interfaces in the namespace pinned at
// the path. It is nil if there is none: the kubelet takes it for granted that there is a
// default one.
func readNetwork(path string) (*runtimeapi.NetworkUsage, error) {
	links, err := listLinks(path)
	if err != nil {
		return nil, fmt.Errorf("read the interfaces in %s: %w", path, err)
	}
	usage := &runtimeapi.NetworkUsage{Timestamp: time.Now().UnixNano()}
	for _, attributes := range links {
		if attributes.Name == defaultInterface {
			usage.DefaultInterface = interfaceUsage(attributes)
			continue
		}
		usage.Interfaces = append(usage.Interfaces, interfaceUsage(attributes))
	}
	if usage.DefaultInterface == nil && len(usage.Interfaces) == 0 {
		return nil, nil
	}
	if usage.DefaultInterface == nil {
		usage.DefaultInterface, usage.Interfaces = usage.Interfaces[0], usage.Interfaces[1:]
	}
	return usage, nil
}

// listLinks are the interfaces in a namespace that have counters, but loopback.
func listLinks(path string) (links []*netlink.LinkAttrs, err error) {
	namespace, err := netns.GetFromPath(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = namespace.Close() }()
	handle, err := netlink.NewHandleAt(namespace, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, err
	}
	defer handle.Close()
	if err := handle.SetSocketTimeout(netlinkTimeout); err != nil {
		return nil, err
	}
	for try := 1; ; try++ {
		all, err := handle.LinkList()
		if errors.Is(err, netlink.ErrDumpInterrupted) && try < dumpTries {
			continue
		}
		for _, link := range all {
			if a := link.Attrs(); a.Flags&net.FlagLoopback == 0 && a.Statistics != nil {
				links = append(links, a)
			}
		}
		return links, err
	}
}

func interfaceUsage(a *netlink.LinkAttrs) *runtimeapi.NetworkInterfaceUsage {
	return &runtimeapi.NetworkInterfaceUsage{
		Name:    a.Name,
		RxBytes: value(a.Statistics.RxBytes), RxErrors: value(a.Statistics.RxErrors),
		TxBytes: value(a.Statistics.TxBytes), TxErrors: value(a.Statistics.TxErrors),
	}
}

func value(v uint64) *runtimeapi.UInt64Value { return &runtimeapi.UInt64Value{Value: v} }
