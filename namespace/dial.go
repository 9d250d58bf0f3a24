package namespace

import (
	"context"
	"fmt"
	"net"

	"github.com/vishvananda/netns"
)

// Dial connects from inside the namespace of id, to an IP address and port:
// a socket belongs to the namespace that its thread was in when it was made
// (network_namespaces(7)), and can be used from any other.
func (n *Dir) Dial(ctx context.Context, id, network, address string) (connection net.Conn, err error) {
	err = OnDisposableThread(func() error {
		handle, err := netns.GetFromPath(n.Path(id))
		if err != nil {
			return fmt.Errorf("open the network namespace: %w", err)
		}
		defer handle.Close()
		if err := netns.Set(handle); err != nil {
			return fmt.Errorf("enter the network namespace: %w", err)
		}
		connection, err = new(net.Dialer).DialContext(ctx, network, address)
		return err
	})
	return connection, err
}
