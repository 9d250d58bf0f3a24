package sandbox

import (
	"net/netip"
	"os"
	"path/filepath"
)

// Details are what a person wants to know of a sandbox, beyond its facts.
type Details struct {
	NetnsPath   string
	NetnsClosed bool
	// RuntimeSpec is the config.json of pause, "null" when it is gone.
	RuntimeSpec []byte
}

// Details looks at the kernel and the files, now.
func (s *Sandboxes) Details(sb *Sandbox) Details {
	details := Details{RuntimeSpec: []byte("null")}
	if !sb.hostNetwork() {
		details.NetnsPath = s.options.Netns.Path(sb.ID)
		details.NetnsClosed = !s.options.Netns.Alive(sb.ID)
	}
	if spec, err := os.ReadFile(filepath.Join(s.Dir(sb.ID), "config.json")); err == nil {
		details.RuntimeSpec = spec
	}
	return details
}

// LiveAddresses are the addresses of the sandbox if the namespace that they
// are in is still there: one may have been removed by hand.
func (s *Sandboxes) LiveAddresses(sb *Sandbox) []netip.Addr {
	addresses := sb.Addresses()
	if len(addresses) == 0 || !s.options.Netns.Alive(sb.ID) {
		return nil
	}
	return addresses
}
