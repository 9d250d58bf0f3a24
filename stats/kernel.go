package stats

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// reader reads the files of one cgroup after another into one buffer. A file
// that cannot be read or parsed leaves out what is in it and nothing else; what
// was wrong with it is kept for failed.
type reader struct {
	buffer []byte
	errs   []error
}

const (
	// bufferSize holds most files, memory.stat several times.
	bufferSize = 16 << 10
	// maxFile is that of a million processes, or of ten thousand devices.
	maxFile = 8 << 20
)

// failed returns what went wrong since it was last called.
func (r *reader) failed() error {
	errs := r.errs
	r.errs = nil
	return errors.Join(errs...)
}

// read returns the content of a file, which is good until the next read, and
// false if there is none. It bypasses os.File, whose poller and finalizer cost
// more than the reading.
func (r *reader) read(dir, name string) ([]byte, bool) {
	path := dir + "/" + name
	content, err := r.readFile(path)
	switch {
	case err == nil:
		return content, true
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENODEV), errors.Is(err, unix.EOPNOTSUPP):
		// Absent, removed while it was open, or switched off as PSI can be.
		return nil, false
	}
	r.errs = append(r.errs, fmt.Errorf("read %s: %w", path, err))
	return nil, false
}

func (r *reader) readFile(path string) ([]byte, error) {
	if r.buffer == nil {
		r.buffer = make([]byte, bufferSize)
	}
	fd, err := open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(fd) }()
	for length := 0; ; {
		if length == len(r.buffer) {
			if length >= maxFile {
				return nil, unix.EFBIG
			}
			r.buffer = append(r.buffer, make([]byte, length)...)
		}
		n, err := unix.Read(fd, r.buffer[length:])
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if n == 0 {
			return r.buffer[:length], nil
		}
		length += n
	}
}

func open(path string) (int, error) {
	for {
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if !errors.Is(err, unix.EINTR) {
			return fd, err
		}
	}
}

// number reads a file that is one number. "max" is the largest one.
func (r *reader) number(dir, name string) (uint64, bool) {
	content, found := r.read(dir, name)
	if !found {
		return 0, false
	}
	content = bytes.TrimSpace(content)
	if string(content) == "max" {
		return math.MaxUint64, true
	}
	return r.parse(dir, name, content)
}

func (r *reader) parse(dir, name string, text []byte) (uint64, bool) {
	value, err := strconv.ParseUint(string(text), 10, 64)
	if err != nil {
		r.errs = append(r.errs, fmt.Errorf("read %s/%s: %w", dir, name, err))
		return 0, false
	}
	return value, true
}

// table reads some rows of a file of "key value" lines, and reports whether it
// could. Rows that are not there leave their variables as they are.
func (r *reader) table(dir, name string, rows map[string]*uint64) bool {
	content, found := r.read(dir, name)
	if !found {
		return false
	}
	for line := range bytes.Lines(content) {
		key, value, _ := bytes.Cut(bytes.TrimSpace(line), []byte(" "))
		row := rows[string(key)]
		if row == nil {
			continue
		}
		if *row, found = r.parse(dir, name, value); !found {
			return false
		}
	}
	return true
}

// hierarchies are where the controllers are mounted; "" for one that is not.
// With version 2 alone only unified is set.
type hierarchies struct {
	cpu, cpuacct, memory, pids, blkio, hugetlb string
	unified                                    string
}

// findHierarchies reads them from the mount table. Of a hierarchy that is
// mounted several times, the first counts.
func findHierarchies() (hierarchies, error) {
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		return hierarchies{}, fmt.Errorf("find the cgroup hierarchies: %w", err)
	}
	var h hierarchies
	for _, m := range mounts {
		h.take(m)
	}
	if h.unified == "" && h.cpuacct == "" && h.memory == "" {
		return hierarchies{}, errors.New("no cgroup hierarchy is mounted: mount cgroup2 on /sys/fs/cgroup")
	}
	return h, nil
}

func (h *hierarchies) take(m *mountinfo.Info) {
	if m.FSType == "cgroup2" {
		setFirst(&h.unified, m.Mountpoint)
		return
	}
	controllers := strings.Split(m.VFSOptions, ",")
	for name, where := range map[string]*string{
		"cpu": &h.cpu, "cpuacct": &h.cpuacct, "memory": &h.memory, "pids": &h.pids, "blkio": &h.blkio, "hugetlb": &h.hugetlb,
	} {
		if slices.Contains(controllers, name) {
			setFirst(where, m.Mountpoint)
		}
	}
}

func setFirst(where *string, value string) {
	if *where == "" {
		*where = value
	}
}

// version2 reports whether a controller is not on version 1, and so on version 2
// if anywhere.
func version2(hierarchy string) bool { return hierarchy == "" }

// dir is a cgroup in a hierarchy. Cleaned as a rooted path, it never leads out.
func dir(hierarchy, path string) string {
	return filepath.Join(hierarchy, filepath.Clean("/"+path))
}

func (u *usage) readPressure(h hierarchies, path string, r *reader) {
	if h.unified == "" {
		return
	}
	unified := dir(h.unified, path)
	u.cpuPressure = r.pressure(unified, "cpu.pressure")
	if u.cpuPressure == nil {
		return // the kernel has none, or the cgroup is not here
	}
	u.memoryPressure = r.pressure(unified, "memory.pressure")
	u.ioPressure = r.pressure(unified, "io.pressure")
}

// pressure reads one file of Pressure Stall Information, nil if there is none.
// Totals are in nanoseconds, as the API has them; the kernel counts microseconds.
//
//	some avg10=0.00 avg60=0.00 avg300=0.00 total=0
//	full avg10=0.00 avg60=0.00 avg300=0.00 total=0
func (r *reader) pressure(dir, name string) *runtimeapi.PsiStats {
	content, found := r.read(dir, name)
	if !found {
		return nil
	}
	stats := &runtimeapi.PsiStats{Some: &runtimeapi.PsiData{}, Full: &runtimeapi.PsiData{}}
	for line := range bytes.Lines(content) {
		fields := bytes.Fields(line)
		data := stats.Some
		if string(fields[0]) == "full" {
			data = stats.Full
		}
		if err := takePressure(data, fields[1:]); err != nil {
			r.errs = append(r.errs, fmt.Errorf("read %s/%s: %w", dir, name, err))
			return nil
		}
	}
	return stats
}

func takePressure(data *runtimeapi.PsiData, fields [][]byte) (err error) {
	averages := map[string]*float64{"avg10": &data.Avg10, "avg60": &data.Avg60, "avg300": &data.Avg300}
	for _, field := range fields {
		key, value, _ := bytes.Cut(field, []byte("="))
		switch average := averages[string(key)]; {
		case average != nil:
			*average, err = strconv.ParseFloat(string(value), 64)
		case string(key) == "total":
			data.Total, err = strconv.ParseUint(string(value), 10, 64)
			data.Total *= uint64(time.Microsecond)
		}
		if err != nil {
			return err
		}
	}
	return nil
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
// the path, but loopback. It is nil if there is none: the kubelet takes it for
// granted that there is a default one.
func readNetwork(path string) (*runtimeapi.NetworkUsage, error) {
	links, err := listLinks(path)
	if err != nil {
		return nil, fmt.Errorf("read the interfaces in %s: %w", path, err)
	}
	usage := &runtimeapi.NetworkUsage{Timestamp: time.Now().UnixNano()}
	for _, link := range links {
		attributes := link.Attrs()
		if attributes.Flags&net.FlagLoopback != 0 || attributes.Statistics == nil {
			continue
		}
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

func listLinks(path string) ([]netlink.Link, error) {
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
		links, err := handle.LinkList()
		if !errors.Is(err, netlink.ErrDumpInterrupted) || try == dumpTries {
			return links, err
		}
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
