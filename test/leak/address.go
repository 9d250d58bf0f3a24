package leak

import (
	"net/netip"
	"strings"
)

// addAddresses adds the addresses that host-local handed out: it keeps a file
// of that name for each, beside its lock and last_reserved_ip files.
func (s Snapshot) addAddresses(dirs []string) error {
	return s.addEntries(Address, dirs, func(name string) bool {
		_, err := netip.ParseAddr(name)
		return err == nil
	})
}

// addResults adds the results that libcni keeps until DEL, in files named
// NETWORK-CONTAINER-INTERFACE.
func (s Snapshot) addResults(dirs, networks []string) error {
	return s.addEntries(Result, dirs, func(name string) bool {
		for _, network := range networks {
			if strings.HasPrefix(name, network+"-") {
				return true
			}
		}
		return len(networks) == 0
	})
}
