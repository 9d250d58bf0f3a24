package stats

import (
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

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
