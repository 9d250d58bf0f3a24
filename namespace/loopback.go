package namespace

import (
	"fmt"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// LoopbackUp sets lo up in the namespace at path; the kernel then gives it
// 127.0.0.1 and ::1.
func LoopbackUp(path string) error {
	namespace, err := netns.GetFromPath(path)
	if err != nil {
		return fmt.Errorf("open the network namespace %s: %w", path, err)
	}
	defer namespace.Close()
	handle, err := netlink.NewHandleAt(namespace, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open a netlink socket in %s: %w", path, err)
	}
	defer handle.Close()
	lo, err := handle.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find lo in %s: %w", path, err)
	}
	if err := handle.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set lo up in %s: %w", path, err)
	}
	return nil
}
