package validate

import (
	"fmt"
	"math"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"unicode/utf8"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/oci"
)

// Node is what the checks of a pod have to know of the runtime.
type Node struct {
	Machine machine.Machine
	// Handlers are the names of runtimes besides the default one, "".
	Handlers []string
	// SystemdCgroup: cgroup parents are names of slices.
	SystemdCgroup bool
}

// Pod reports what is wrong with a request for a sandbox.
func Pod(config *runtimeapi.PodSandboxConfig, handler string, node Node) error {
	c := &pod{config: config, node: node}
	if config == nil {
		c.bad("config", "is missing")
		return c.err()
	}
	c.handler(handler)
	c.metadata()
	c.hostname()
	c.logDirectory()
	c.dns()
	c.portMappings()
	c.texts("labels", config.GetLabels())
	c.texts("annotations", config.GetAnnotations())
	c.bandwidth()
	c.cgroupParent()
	c.namespaces()
	c.userNamespace()
	c.user()
	c.sysctls()
	c.profiles()
	c.resources("config.linux.overhead.", config.GetLinux().GetOverhead(), node.Machine)
	c.resources("config.linux.resources.", config.GetLinux().GetResources(), node.Machine)
	c.notWindows("config.windows", config.GetWindows() != nil)
	return c.err()
}

type pod struct {
	problems
	config *runtimeapi.PodSandboxConfig
	node   Node
}

func (c *pod) security() *runtimeapi.LinuxSandboxSecurityContext {
	return c.config.GetLinux().GetSecurityContext()
}

func (c *pod) handler(handler string) {
	if handler != "" && !slices.Contains(c.node.Handlers, handler) {
		c.bad("runtime_handler", "%q is unknown, this runtime has %q", handler, c.node.Handlers)
	}
}

func (c *pod) metadata() {
	m := c.config.GetMetadata()
	if m == nil {
		c.bad("config.metadata", "is missing")
		return
	}
	c.name("config.metadata.name", m.GetName(), true)
	c.name("config.metadata.namespace", m.GetNamespace(), false)
	c.name("config.metadata.uid", m.GetUid(), false)
}

// name: these go into CNI_ARGS, log lines and the unique name of the sandbox.
func (c *pod) name(field, name string, required bool) {
	switch {
	case name == "" && required:
		c.bad(field, "is empty")
	case len(name) > longestName:
		c.bad(field, "has %d characters, more than %d", len(name), longestName)
	case !utf8.ValidString(name) || strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r == 0x7f || strings.ContainsRune("/;=", r) }):
		c.bad(field, "%q has a space, a control character or one of / ; =", name)
	case name == "." || strings.Contains(name, ".."):
		c.bad(field, "%q has '..' in it", name)
	}
}

// longestHostname is HOST_NAME_MAX (sethostname(2)).
const longestHostname = 64

func (c *pod) hostname() {
	name := c.config.GetHostname()
	switch {
	case name != "" && oci.HostNetwork(c.config):
		c.bad("config.hostname", "is %q, but a pod in the network of the node has the name of the node", name)
	case len(name) > longestHostname:
		c.bad("config.hostname", "has %d characters, the kernel takes %d", len(name), longestHostname)
	case strings.ContainsFunc(name, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("-._", r))
	}):
		c.bad("config.hostname", "%q has a character that a host name cannot have", name)
	}
}

func (c *pod) logDirectory() {
	dir := c.config.GetLogDirectory()
	switch {
	case dir == "":
	case strings.ContainsRune(dir, 0):
		c.bad("config.log_directory", "has a NUL character")
	case !filepath.IsAbs(dir):
		c.bad("config.log_directory", "%q is not an absolute path", dir)
	case slices.Contains(strings.Split(dir, "/"), ".."):
		c.bad("config.log_directory", "%q has an element '..'", dir)
	}
}

// dns: each of these becomes a word in resolv.conf(5).
func (c *pod) dns() {
	dns := c.config.GetDnsConfig()
	for field, words := range map[string][]string{"servers": dns.GetServers(), "searches": dns.GetSearches(), "options": dns.GetOptions()} {
		for i, word := range words {
			if word == "" || strings.ContainsFunc(word, func(r rune) bool { return r <= ' ' || r == 0x7f }) {
				c.bad(fmt.Sprintf("config.dns_config.%s[%d]", field, i), "%q is not one word", word)
			}
		}
	}
}

func (c *pod) portMappings() {
	for i, m := range c.config.GetPortMappings() {
		field := fmt.Sprintf("config.port_mappings[%d].", i)
		if _, known := runtimeapi.Protocol_name[int32(m.GetProtocol())]; !known {
			c.bad(field+"protocol", "%d is unknown", m.GetProtocol())
		}
		if m.GetHostPort() < 0 || m.GetHostPort() > math.MaxUint16 {
			c.bad(field+"host_port", "%d is not a port", m.GetHostPort())
		}
		if m.GetContainerPort() < 0 || m.GetContainerPort() > math.MaxUint16 || m.GetHostPort() > 0 && m.GetContainerPort() == 0 {
			c.bad(field+"container_port", "%d is not a port", m.GetContainerPort())
		}
		if _, err := netip.ParseAddr(m.GetHostIp()); m.GetHostIp() != "" && err != nil {
			c.bad(field+"host_ip", "%w", err)
		}
	}
}

func (c *pod) cgroupParent() {
	if err := checkCgroupParent(c.config.GetLinux().GetCgroupParent(), c.node.SystemdCgroup); err != nil {
		c.bad("config.linux.cgroup_parent", "%w", err)
	}
}

func (c *pod) namespaces() {
	const field = "config.linux.security_context.namespace_options."
	o := c.security().GetNamespaceOptions()
	const ofPod, ofContainer, ofNode = runtimeapi.NamespaceMode_POD, runtimeapi.NamespaceMode_CONTAINER, runtimeapi.NamespaceMode_NODE
	c.mode(field+"network", o.GetNetwork(), ofPod, ofNode)
	c.mode(field+"pid", o.GetPid(), ofPod, ofContainer, ofNode)
	c.mode(field+"ipc", o.GetIpc(), ofPod, ofNode)
	if o.GetTargetId() != "" {
		c.bad(field+"target_id", "is for containers, a sandbox has no target")
	}
}

func (c *pod) user() {
	const field = "config.linux.security_context."
	security := c.security()
	c.id(field+"run_as_user", security.GetRunAsUser())
	c.id(field+"run_as_group", security.GetRunAsGroup())
	if security.GetRunAsGroup() != nil && security.GetRunAsUser() == nil {
		c.bad(field+"run_as_group", "is set without run_as_user")
	}
	for i, group := range security.GetSupplementalGroups() {
		c.id(fmt.Sprintf("%ssupplemental_groups[%d]", field, i), &runtimeapi.Int64Value{Value: group})
	}
	if _, known := runtimeapi.SupplementalGroupsPolicy_name[int32(security.GetSupplementalGroupsPolicy())]; !known {
		c.bad(field+"supplemental_groups_policy", "%d is unknown", security.GetSupplementalGroupsPolicy())
	}
}

func (c *pod) sysctls() {
	sysctls := c.config.GetLinux().GetSysctls()
	for name, value := range sysctls {
		field := fmt.Sprintf("config.linux.sysctls[%s]", name)
		if dotted := oci.SysctlName(name); dotted != name {
			if _, twice := sysctls[dotted]; twice {
				c.bad(field, "is there as %s, too", dotted)
			}
		}
		if err := checkSysctl(c.config, name); err != nil {
			c.bad(field, "%w", err)
		}
		if strings.ContainsRune(value, 0) {
			c.bad(field, "the value has a NUL character")
		}
	}
}

func (c *pod) profiles() {
	const field = "config.linux.security_context."
	seccomp, apparmor := oci.SeccompOf(c.security()), c.security().GetApparmor()
	c.profileType(field+"seccomp.profile_type", seccomp)
	c.profileType(field+"apparmor.profile_type", apparmor)
	if err := checkSeccomp(seccomp); err != nil {
		c.bad(field+"seccomp", "%w", err)
	}
	if err := checkAppArmor(apparmor, c.node.Machine); err != nil {
		c.bad(field+"apparmor", "%w", err)
	}
}
