package sandbox

import (
	"math"
	"strings"

	"github.com/minicri/minicri/internal/validate"
	"github.com/minicri/minicri/network"
)

// bandwidthBurst is as much as fits: the limit is the rate, not the burst.
const bandwidthBurst = math.MaxUint32

// newAttachment is what ADD is called with, as containerd has it: the pod's
// names as CNI_ARGS and what the pod asks for as capabilities, which libcni
// hands to the plugins that declare them.
func newAttachment(sb *Sandbox, configuration *network.Configuration) (network.Attachment, error) {
	metadata := sb.config.GetMetadata()
	a := network.Attachment{
		ID:      sb.ID,
		Network: configuration.Name,
		Config:  configuration.Bytes,
		Args: map[string]string{
			"IgnoreUnknown":              "1",
			"K8S_POD_NAMESPACE":          metadata.GetNamespace(),
			"K8S_POD_NAME":               metadata.GetName(),
			"K8S_POD_INFRA_CONTAINER_ID": sb.ID,
			"K8S_POD_UID":                metadata.GetUid(),
		},
	}
	for name, value := range capabilities(sb) {
		if err := a.SetCapability(name, value); err != nil {
			return network.Attachment{}, err
		}
	}
	return a, nil
}

func capabilities(sb *Sandbox) map[string]any {
	values := map[string]any{"io.kubernetes.cri.pod-annotations": sb.config.GetAnnotations()}
	if mappings := portMappings(sb); len(mappings) > 0 {
		values["portMappings"] = mappings
	}
	if limit, limited := bandwidth(sb.config.GetAnnotations()); limited {
		values["bandwidth"] = limit
	}
	if dns := sb.config.GetDnsConfig(); dns != nil {
		values["dns"] = network.DNS{Servers: dns.GetServers(), Searches: dns.GetSearches(), Options: dns.GetOptions()}
	}
	if parent := sb.config.GetLinux().GetCgroupParent(); parent != "" {
		values["cgroupPath"] = parent
	}
	return values
}

// portMappings are those with a host port; the others only inform.
func portMappings(sb *Sandbox) []network.PortMapping {
	var mappings []network.PortMapping
	for _, m := range sb.config.GetPortMappings() {
		if m.GetHostPort() <= 0 {
			continue
		}
		mappings = append(mappings, network.PortMapping{
			HostPort:      m.GetHostPort(),
			ContainerPort: m.GetContainerPort(),
			Protocol:      strings.ToLower(m.GetProtocol().String()),
			HostIP:        m.GetHostIp(),
		})
	}
	return mappings
}

// bandwidth reads the annotations; the check has made sure that they can be read.
func bandwidth(annotations map[string]string) (limit network.BandWidth, limited bool) {
	if rate, err := validate.BitsPerSecond(annotations[validate.IngressBandwidth]); err == nil && rate > 0 {
		limit.IngressRate, limit.IngressBurst, limited = rate, bandwidthBurst, true
	}
	if rate, err := validate.BitsPerSecond(annotations[validate.EgressBandwidth]); err == nil && rate > 0 {
		limit.EgressRate, limit.EgressBurst, limited = rate, bandwidthBurst, true
	}
	return limit, limited
}
