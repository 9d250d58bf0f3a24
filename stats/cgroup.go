package stats

import (
	"cmp"
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
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// hierarchies are the mounts of cgroup version 2, or of the controllers of version 1, by name.
type hierarchies struct {
	unified string
	v1      map[string]string
}

const (
	forStats   = cgroups.CPU | cgroups.Memory | cgroups.Pids | cgroups.IO // of IO its pressure alone
	forMetrics = forStats | cgroups.HugeTLB
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
		for _, name := range []string{"cpu", "cpuacct", "memory", "pids", "blkio", "hugetlb"} {
			if m.FSType == "cgroup" && h.v1[name] == "" && slices.Contains(strings.Split(m.VFSOptions, ","), name) {
				h.v1[name] = m.Mountpoint
			}
		}
	}
	switch {
	case len(h.v1) > 0:
		h.unified = ""
	case h.unified == "":
		return h, errors.New("no cgroup hierarchy is mounted: mount cgroup2 on /sys/fs/cgroup")
	}
	return h, nil
}

// dir is a cgroup in the hierarchy of a controller. Cleaned as a rooted path, it never leads out.
func (h hierarchies) dir(controller, path string) string {
	return filepath.Join(cmp.Or(h.v1[controller], h.unified), filepath.Clean("/"+path))
}

// read returns errdefs.ErrNotFound without the cgroup. On version 2 the statistics may be partial, with an error.
func (h hierarchies) read(path string, wanted cgroups.Controller) (all *cgroups.Stats, err error) {
	var manager cgroups.Manager
	if h.unified != "" {
		manager, err = fs2.NewManager(&cgroups.Cgroup{}, h.dir("", path))
	} else {
		paths := make(map[string]string)
		for name := range h.v1 {
			paths[name] = h.dir(name, path)
		}
		manager, err = fs.NewManager(&cgroups.Cgroup{Resources: &cgroups.Resources{}}, paths)
	}
	if err != nil {
		return nil, err
	}
	all, err = manager.Stats(&cgroups.StatsOptions{Controllers: wanted})
	return all, h.orGone(path, err)
}

func (h hierarchies) orGone(path string, err error) error {
	for _, controller := range []string{"memory", "cpuacct"} {
		if _, statErr := os.Stat(h.dir(controller, path)); statErr == nil {
			return err
		}
	}
	return fmt.Errorf("measure cgroup %s: %w", path, errdefs.ErrNotFound)
}

// usage is what one or several cgroups use. A part that could not be read is nil.
type usage struct {
	*cgroups.Stats
	at     time.Time
	memory *memory
	swap   *swap
}

// memory is in bytes. limit is at least unlimited if there is none.
type memory struct {
	usage, limit             uint64
	inactiveFile, activeFile uint64
	anon, faults, major      uint64
}

type swap struct{ usage, limit uint64 }

// unlimited is half of the largest signed number, by which version 1, rounded to pages, says "no limit".
const unlimited = 1 << 62

// workingSet is what the kubelet evicts by: what the kernel cannot easily reclaim.
func (m *memory) workingSet() uint64 { return m.usage - min(m.usage, m.inactiveFile) }

// readUsage adds up those cgroups that are there, errdefs.ErrNotFound without any. It logs what is missing.
func (m *Meter) readUsage(id string, wanted cgroups.Controller, paths ...string) (sum *usage, gone error) {
	for _, path := range paths {
		all, err := m.hierarchies.read(path, wanted)
		switch {
		case errdefs.IsNotFound(err):
			gone = err
			continue
		case all == nil:
			return nil, fmt.Errorf("measure cgroup %s: %w", path, err)
		case err != nil:
			m.logger.Warn("some numbers are left out of the stats", "id", id, "err", err)
		}
		part := &usage{Stats: all, at: time.Now()}
		part.takeMemory(m.hierarchies, path)
		if sum == nil {
			sum = part
		} else {
			sum.add(part)
		}
	}
	if sum == nil {
		return nil, gone
	}
	return sum, nil
}

// add leaves out pressure, which cannot be added, and the limit, which each part has for itself.
func (u *usage) add(other *usage) {
	u.CpuStats.PSI, u.MemoryStats.PSI, u.BlkioStats.PSI = nil, nil, nil
	u.PidsStats.Current += other.PidsStats.Current
	u.CpuStats.CpuUsage.TotalUsage += other.CpuStats.CpuUsage.TotalUsage
	if to, from := u.memory, other.memory; to != nil && from != nil {
		to.limit = unlimited
		to.usage += from.usage
		to.inactiveFile += from.inactiveFile
		to.anon += from.anon
		to.faults += from.faults
		to.major += from.major
	}
}

// takeMemory takes the total_ rows of memory.stat on version 1: usage includes the cgroups below. The limit is the
// cgroup's own, as for containerd: with that of a cgroup above, which is shared, memory would seem available to each.
func (u *usage) takeMemory(h hierarchies, path string) {
	stats := u.MemoryStats
	row, prefix, anon := stats.Stats, "", "anon"
	if len(row) == 0 {
		return // without the controller
	}
	m := &memory{usage: stats.Usage.Usage, limit: stats.Usage.Limit}
	if h.unified != "" {
		if _, err := os.Stat(filepath.Join(h.dir("memory", path), "memory.swap.current")); err == nil {
			u.swap = &swap{usage: stats.SwapOnlyUsage.Usage, limit: stats.SwapOnlyUsage.Limit}
		}
	} else {
		prefix, anon = "total_", "rss"
		u.swap = &swap{usage: row["total_swap"], limit: unlimited}
		if both, counted := row["hierarchical_memsw_limit"]; counted && both < unlimited {
			u.swap.limit = both - min(both, row["hierarchical_memory_limit"])
		}
	}
	m.inactiveFile, m.activeFile, m.anon = row[prefix+"inactive_file"], row[prefix+"active_file"], row[prefix+anon]
	m.faults, m.major = row[prefix+"pgfault"], row[prefix+"pgmajfault"]
	u.memory = m
}

// psi converts the kernel's microseconds to the API's nanoseconds.
func psi(from *cgroups.PSIStats) *runtimeapi.PsiStats {
	if from == nil {
		return nil
	}
	data := func(d cgroups.PSIData) *runtimeapi.PsiData {
		return &runtimeapi.PsiData{Avg10: d.Avg10, Avg60: d.Avg60, Avg300: d.Avg300, Total: d.Total * uint64(time.Microsecond)}
	}
	return &runtimeapi.PsiStats{Some: data(from.Some), Full: data(from.Full)}
}

func (u *usage) memoryUsage() *runtimeapi.MemoryUsage {
	m := u.memory
	if m == nil {
		return nil
	}
	return &runtimeapi.MemoryUsage{
		Timestamp: u.at.UnixNano(), Psi: psi(u.MemoryStats.PSI),
		WorkingSetBytes: value(m.workingSet()), AvailableBytes: available(m.limit, m.workingSet()),
		UsageBytes: value(m.usage), RssBytes: value(m.anon), PageFaults: value(m.faults), MajorPageFaults: value(m.major),
	}
}

func available(limit, used uint64) *runtimeapi.UInt64Value {
	if limit >= unlimited {
		return nil
	}
	return value(limit - min(limit, used))
}

func (u *usage) swapUsage() *runtimeapi.SwapUsage {
	s := u.swap
	if s == nil {
		return nil
	}
	return &runtimeapi.SwapUsage{
		Timestamp: u.at.UnixNano(), SwapAvailableBytes: available(s.limit, s.usage), SwapUsageBytes: value(s.usage),
	}
}

func (u *usage) ioUsage() *runtimeapi.IoUsage {
	if u.BlkioStats.PSI == nil {
		return nil
	}
	return &runtimeapi.IoUsage{Timestamp: u.at.UnixNano(), Psi: psi(u.BlkioStats.PSI)}
}

// readNetwork returns nil for a namespace without interfaces: the kubelet expects a default one. The list includes the
// default, as with containerd and in the kubelet's own summary, although the CRI excludes it.
func readNetwork(path string) (*runtimeapi.NetworkUsage, error) {
	links, err := listLinks(path)
	if err != nil {
		return nil, fmt.Errorf("read the interfaces in %s: %w", path, err)
	}
	if len(links) == 0 {
		return nil, nil
	}
	usage := &runtimeapi.NetworkUsage{Timestamp: time.Now().UnixNano()}
	for _, a := range links {
		usage.Interfaces = append(usage.Interfaces, &runtimeapi.NetworkInterfaceUsage{
			Name:    a.Name,
			RxBytes: value(a.Statistics.RxBytes), RxErrors: value(a.Statistics.RxErrors),
			TxBytes: value(a.Statistics.TxBytes), TxErrors: value(a.Statistics.TxErrors),
		})
	}
	usage.DefaultInterface = usage.Interfaces[0]
	return usage, nil
}

// listLinks returns the interfaces in a namespace that have counters, without loopback: eth0 first, and maxLinks others,
// as a container may make them without end, and an answer is about all pods.
func listLinks(path string) (links []*netlink.LinkAttrs, err error) {
	namespace, err := netns.GetFromPath(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = namespace.Close() }()
	socket, err := nl.GetNetlinkSocketAt(namespace, netns.None(), unix.NETLINK_ROUTE)
	if err != nil {
		return nil, err
	}
	defer socket.Close()
	limit := unix.NsecToTimeval(int64(linksLimit))
	_, _ = socket.SetSendTimeout(&limit), socket.SetReceiveTimeout(&limit) // never fail
	err = netlink.ErrDumpInterrupted
	for try := 0; errors.Is(err, netlink.ErrDumpInterrupted) && try < 3; try++ { // an interface came or went
		links = nil
		request := nl.NewNetlinkRequest(unix.RTM_GETLINK, unix.NLM_F_DUMP)
		request.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: {Socket: socket}}
		request.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
		err = request.ExecuteIter(unix.NETLINK_ROUTE, unix.RTM_NEWLINK, func(message []byte) bool {
			link, err := netlink.LinkDeserialize(nil, message)
			if err != nil || link.Attrs().Flags&net.FlagLoopback != 0 || link.Attrs().Statistics == nil {
				return true
			}
			a := link.Attrs()
			a.Name = strings.ToValidUTF8(a.Name, "\uFFFD") // a container may choose it
			if a.Name == "eth0" {
				links = slices.Insert(links, 0, a)
			} else if len(links) < maxLinks {
				links = append(links, a)
			}
			return len(links) < maxLinks || links[0].Name != "eth0"
		})
	}
	return links, err
}

func value(v uint64) *runtimeapi.UInt64Value { return &runtimeapi.UInt64Value{Value: v} }
