package contender

import "fmt"

// ConfList is the network that pods of benchmarks are in: a bridge with
// addresses of a subnet, which are kept in a directory.
func ConfList(name, bridge, subnet, addresses string) []byte {
	return fmt.Appendf(nil, `{
  "cniVersion": "1.0.0", "name": %q,
  "plugins": [
    {"type": "bridge", "bridge": %q, "isGateway": true, "ipMasq": true, "hairpinMode": true,
     "ipam": {"type": "host-local", "dataDir": %q, "ranges": [[{"subnet": %q}]], "routes": [{"dst": "0.0.0.0/0"}]}},
    {"type": "portmap", "capabilities": {"portMappings": true}, "snat": true}
  ]
}`, name, bridge, addresses, subnet)
}

// embeddedNetwork is minicri's configuration of its own network, with addresses in a
// directory.
func embeddedNetwork(addresses string) string {
	return fmt.Sprintf("[default_network]\nenabled = true\nbridge = \"bench0\"\nsubnet = \"10.200.0.0/16\"\ndata_dir = %q\n", addresses)
}
