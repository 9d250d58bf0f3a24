package validate

import (
	"cmp"
	"slices"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/oci"
)

// userNamespace: the mappings go into uid_map and gid_map as they are
// (user_namespaces(7)), and id 0 of the container must be mapped.
func (c *pod) userNamespace() {
	const field = "config.linux.security_context.namespace_options."
	options := c.security().GetNamespaceOptions()
	userns := options.GetUsernsOptions()
	c.mode(field+"userns_options.mode", userns.GetMode(), runtimeapi.NamespaceMode_POD, runtimeapi.NamespaceMode_NODE)
	if oci.UserNamespace(c.config) == nil {
		if len(userns.GetUids())+len(userns.GetGids()) > 0 {
			c.bad(field+"userns_options", "has mappings, but the mode is %v", userns.GetMode())
		}
		return
	}
	c.mappings(field+"userns_options.uids", userns.GetUids())
	c.mappings(field+"userns_options.gids", userns.GetGids())
	if !c.node.Machine.UserNamespaces {
		c.bad(field+"userns_options", "this machine cannot map the owners of an image's files: see 'minicri check'")
	}
	for name, mode := range map[string]runtimeapi.NamespaceMode{"pid": options.GetPid(), "ipc": options.GetIpc()} {
		if mode == runtimeapi.NamespaceMode_NODE {
			c.bad(field+name, "is NODE, which a pod with a user namespace of its own cannot have")
		}
	}
}

// mostMappings is less than the 340 lines that the kernel takes: the mappings of
// a container's root are kept in a label of at most 4096 bytes.
const mostMappings = 120

func (c *pod) mappings(field string, mappings []*runtimeapi.IDMapping) {
	if len(mappings) == 0 || len(mappings) > mostMappings {
		c.bad(field, "has %d mappings, 1 to %d are possible", len(mappings), mostMappings)
		return
	}
	c.idRanges(field, mappings)
	c.overlap(field+": container ids", mappings, (*runtimeapi.IDMapping).GetContainerId)
	c.overlap(field+": host ids", mappings, (*runtimeapi.IDMapping).GetHostId)
	if !slices.ContainsFunc(mappings, func(m *runtimeapi.IDMapping) bool { return m.GetContainerId() == 0 }) {
		c.bad(field, "container id 0 is not mapped, the pod would have no root")
	}
}

func (c *pod) overlap(field string, mappings []*runtimeapi.IDMapping, start func(*runtimeapi.IDMapping) uint32) {
	sorted := slices.SortedFunc(slices.Values(mappings), func(a, b *runtimeapi.IDMapping) int { return cmp.Compare(start(a), start(b)) })
	for i := 1; i < len(sorted); i++ {
		if uint64(start(sorted[i-1]))+uint64(sorted[i-1].GetLength()) > uint64(start(sorted[i])) {
			c.bad(field, "the ranges at %d and %d overlap", start(sorted[i-1]), start(sorted[i]))
		}
	}
}
