package leak

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
)

// addLinks adds the network interfaces of the calling thread's network
// namespace. The index belongs to the name: a link made anew is another link.
func (s Snapshot) addLinks(wanted bool) error {
	if !wanted {
		return nil
	}
	links, err := listLinks()
	if err != nil {
		return fmt.Errorf("listing links: %w", err)
	}
	for _, link := range links {
		attrs := link.Attrs()
		s.add(Link, fmt.Sprintf("%s (%d)", attrs.Name, attrs.Index), "", link.Type())
	}
	return nil
}

// listLinks asks again when the table changed during the answer, as it does
// while pods come and go.
func listLinks() ([]netlink.Link, error) {
	const tries = 10
	var err error
	for range tries {
		var links []netlink.Link
		links, err = netlink.LinkList()
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			return links, err
		}
	}
	return nil, err
}
