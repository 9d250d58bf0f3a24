package validate

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/oci"
)

// Node is what the checks of a pod need to know of the node.
type Node struct {
	Machine       machine.Machine
	Handlers      []string // the runtime handlers besides ""
	SystemdCgroup bool     // cgroup parents are names of slices
}

type pod struct {
	problems
	config   *runtimeapi.PodSandboxConfig
	security *runtimeapi.LinuxSandboxSecurityContext
	node     Node
}

// Pod reports what is wrong with a request for a sandbox.
func Pod(config *runtimeapi.PodSandboxConfig, handler string, node Node) error {
	c := &pod{config: config, security: config.GetLinux().GetSecurityContext(), node: node}
	if config == nil {
		c.bad("config", "is missing")
		return c.err()
	}
	if handler != "" && !slices.Contains(node.Handlers, handler) {
		c.bad("runtime_handler", "%q is unknown, this runtime has %q", handler, node.Handlers)
	}
	c.form("config.", config.ProtoReflect())
	c.metadata()
	c.hostname()
	if dir := config.GetLogDirectory(); dir != "" {
		c.absolute("config.log_directory", dir)
	}
	c.dns()
	c.portMappings()
	if !oci.HostNetwork(config) { // where no plugin limits it
		c.bandwidth()
	}
	if err := CgroupParent(config.GetLinux().GetCgroupParent(), node.SystemdCgroup); err != nil {
		c.bad("config.linux.cgroup_parent", "%w", err)
	}
	c.namespaces()
	c.userNamespace()
	c.user()
	c.sysctls()
	c.profiles(oci.SeccompOf(c.security), c.security.GetApparmor(), node.Machine)
	c.resources("config.linux.overhead.", config.GetLinux().GetOverhead(), node.Machine)
	c.resources("config.linux.resources.", config.GetLinux().GetResources(), node.Machine)
	return c.err()
}

// metadata goes into CNI_ARGS, log lines and the sandbox's unique name.
func (c *pod) metadata() {
	m := c.config.GetMetadata()
	if m == nil {
		c.bad("config.metadata", "is missing")
		return
	}
	if m.GetName() == "" {
		c.bad("config.metadata.name", "is empty")
	}
	for field, name := range map[string]string{"name": m.GetName(), "namespace": m.GetNamespace(), "uid": m.GetUid()} {
		field = "config.metadata." + field
		switch {
		case len(name) > longestName:
			c.bad(field, "has %d characters, more than %d", len(name), longestName)
		case !utf8.ValidString(name) || strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r == 0x7f || strings.ContainsRune("/;=", r) }):
			c.bad(field, "%q has a space, a control character or one of / ; =", name)
		case name == "." || strings.Contains(name, ".."):
			c.bad(field, "%q has '..' in it", name)
		}
	}
}

const longestHostname = 64 // HOST_NAME_MAX (sethostname(2))

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

// dns checks what becomes a word in resolv.conf(5). The API server accepts any text as an option: several in one, too.
func (c *pod) dns() {
	dns := c.config.GetDnsConfig()
	for field, words := range map[string][]string{"servers": dns.GetServers(), "searches": dns.GetSearches()} {
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
		if m.GetHostPort() < 0 || m.GetHostPort() > math.MaxUint16 {
			c.bad(field+"host_port", "%d is not a port", m.GetHostPort())
		}
		least := min(m.GetHostPort(), 1) // without a host port it only informs
		if m.GetContainerPort() < least || m.GetContainerPort() > math.MaxUint16 {
			c.bad(field+"container_port", "%d is not a port", m.GetContainerPort())
		}
		// The API server checks no address. One that nobody uses may be any text.
		if _, err := HostIP(m.GetHostIp()); err != nil && m.GetHostPort() > 0 && !oci.HostNetwork(c.config) {
			c.bad(field+"host_ip", "%w: write an IP address of the node", err)
		}
	}
}

// HostIP reads the address of a host port, which the API server does not check: octets may begin with zeros, as in
// older manifests, and brackets may be around an IPv6 address. "" is all addresses.
func HostIP(text string) (string, error) {
	bare := strings.TrimSpace(text)
	if inside, is := strings.CutPrefix(bare, "["); is {
		bare = strings.TrimSuffix(inside, "]")
	}
	if octets := strings.Split(bare, "."); len(octets) == 4 {
		for i, octet := range octets {
			octets[i] = cmp.Or(strings.TrimLeft(octet, "0"), octet[:min(len(octet), 1)])
		}
		bare = strings.Join(octets, ".")
	}
	if bare == "" {
		return "", nil
	}
	address, err := netip.ParseAddr(bare)
	if err != nil {
		return "", err
	}
	return address.String(), nil
}

func (c *pod) namespaces() {
	o := c.security.GetNamespaceOptions()
	const ofPod, ofContainer, ofNode = runtimeapi.NamespaceMode_POD, runtimeapi.NamespaceMode_CONTAINER, runtimeapi.NamespaceMode_NODE
	c.mode(namespaceField+"network", o.GetNetwork(), ofPod, ofNode)
	c.mode(namespaceField+"pid", o.GetPid(), ofPod, ofContainer, ofNode)
	c.mode(namespaceField+"ipc", o.GetIpc(), ofPod, ofNode)
	if o.GetTargetId() != "" {
		c.bad(namespaceField+"target_id", "is for containers, a sandbox has no target")
	}
}

func (c *pod) user() {
	c.id(securityContext+"run_as_user", c.security.GetRunAsUser().GetValue(), lastID)
	c.id(securityContext+"run_as_group", c.security.GetRunAsGroup().GetValue(), lastID)
	c.ids(securityContext+"supplemental_groups", c.security.GetSupplementalGroups(), lastID)
	if c.security.GetRunAsGroup() != nil && c.security.GetRunAsUser() == nil {
		c.bad(securityContext+"run_as_group", "is set without run_as_user")
	}
}

func (c *pod) sysctls() {
	sysctls := c.config.GetLinux().GetSysctls()
	for name, value := range sysctls {
		field := fmt.Sprintf("config.linux.sysctls[%s]", name)
		if dotted := oci.SysctlName(name); dotted != name {
			if other, twice := sysctls[dotted]; twice && other != value {
				c.bad(field, "is there as %s, too, with another value", dotted)
			}
		}
		if err := checkSysctl(c.config, name); err != nil {
			c.bad(field, "%w", err)
		}
	}
}

// CgroupParent reports why no pod can have this parent.
func CgroupParent(parent string, systemd bool) error {
	switch {
	case leadsUp(parent):
		return fmt.Errorf("%q has an element '..'", parent)
	case strings.Contains(parent, ":"):
		return fmt.Errorf("%q has a character that a cgroup parent cannot have", parent)
	case systemd && parent != "" && !strings.HasSuffix(path.Base(parent), ".slice"):
		return fmt.Errorf("%q is not a slice, but the cgroup driver is systemd: kubelet and runtime have to use the same driver", parent)
	}
	return CgroupName(parent)
}

const longestElement = 255 // NAME_MAX, in bytes

// CgroupName reports why no cgroup can have the name or path: it could be neither found nor removed.
func CgroupName(name string) error {
	if strings.ContainsAny(name, "\x00\n") {
		return fmt.Errorf("%q has a NUL or a newline: %w", name, errdefs.ErrInvalidArgument)
	}
	for element := range strings.SplitSeq(name, "/") {
		if len(element) > longestElement {
			return fmt.Errorf("an element of %.300q has %d bytes, more than %d: %w", name, len(element), longestElement, errdefs.ErrInvalidArgument)
		}
	}
	return nil
}

// The annotations of the bandwidth capability, as the kubelet has them.
const (
	IngressBandwidth = "kubernetes.io/ingress-bandwidth"
	EgressBandwidth  = "kubernetes.io/egress-bandwidth"
)

func (c *pod) bandwidth() {
	for _, name := range []string{IngressBandwidth, EgressBandwidth} {
		value := c.config.GetAnnotations()[name]
		// The bounds are the kubelet's: 1k to 1P.
		if rate, err := BitsPerSecond(value); value != "" && (err != nil || rate < 1e3 || rate > 1e15) {
			c.bad("config.annotations["+name+"]", "%q is not a rate between 1k and 1P bits per second", value)
		}
	}
}

// BitsPerSecond reads a quantity: k, M, G, T, P are powers of 1000, Ki, Mi, Gi, Ti, Pi of 1024.
func BitsPerSecond(text string) (uint64, error) {
	digits := strings.TrimRight(text, "kKMGTPi")
	factor, known := map[string]float64{
		"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
		"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50,
	}[text[len(digits):]]
	number, err := strconv.ParseFloat(digits, 64)
	if err != nil || !known || number < 0 || math.IsInf(number, 0) || math.IsNaN(number) || number*factor > math.MaxInt64 {
		return 0, fmt.Errorf("%q is not a quantity", text)
	}
	return uint64(number * factor), nil
}

// checkSysctl refuses what is not of a namespace of the pod's own. An element of dots alone (here slashes,
// see oci.SysctlName) would lead out of the namespace's directory.
func checkSysctl(config *runtimeapi.PodSandboxConfig, name string) error {
	dotted := oci.SysctlName(name)
	if strings.ContainsAny(dotted, "\x00 ") || slices.ContainsFunc(strings.Split(dotted, "."), func(element string) bool { return strings.Trim(element, "/") == "" }) {
		return errors.New("not a name of a kernel parameter")
	}
	switch kind := oci.SysctlNamespace(name); {
	case kind == "":
		return fmt.Errorf("%s is not a parameter of a namespace, it would change the node", dotted)
	case oci.OwnsSysctl(config, name):
		return nil
	case kind == specs.NetworkNamespace:
		return errors.New("the pod shares the network namespace with the node")
	case kind == specs.UTSNamespace:
		return errors.New("the pod shares the UTS namespace with the node")
	case kind == specs.UserNamespace:
		return errors.New("the pod shares the user namespace with the node: set hostUsers to false")
	default:
		return errors.New("the pod shares the IPC namespace with the node")
	}
}

// userNamespace checks what goes into uid_map and gid_map (user_namespaces(7)).
func (c *pod) userNamespace() {
	const field = namespaceField + "userns_options"
	options := c.security.GetNamespaceOptions()
	userns := options.GetUsernsOptions()
	c.mode(field+".mode", userns.GetMode(), runtimeapi.NamespaceMode_POD, runtimeapi.NamespaceMode_NODE)
	if oci.UserNamespace(c.config) == nil {
		if len(userns.GetUids())+len(userns.GetGids()) > 0 {
			c.bad(field, "has mappings, but the mode is %v", userns.GetMode())
		}
		return
	}
	c.mappings(field+".uids", userns.GetUids())
	c.mappings(field+".gids", userns.GetGids())
	if err := c.node.Machine.MapsUsers(); err != nil {
		c.bad(field, "%v", err)
	}
	for name, mode := range map[string]runtimeapi.NamespaceMode{"pid": options.GetPid(), "ipc": options.GetIpc()} {
		if mode == runtimeapi.NamespaceMode_NODE {
			c.bad(namespaceField+name, "is NODE, which a pod with a user namespace of its own cannot have")
		}
	}
}

const maxMappings = 120 // less than the kernel's 340: a label of 4096 bytes holds those of a root

func (c *pod) mappings(field string, mappings []*runtimeapi.IDMapping) {
	if len(mappings) == 0 || len(mappings) > maxMappings {
		c.bad(field, "has %d mappings, 1 to %d are possible", len(mappings), maxMappings)
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
