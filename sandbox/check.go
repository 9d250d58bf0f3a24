package sandbox

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/oci"
)

// The annotations of the bandwidth capability, as the kubelet has them.
const (
	ingressBandwidth = "kubernetes.io/ingress-bandwidth"
	egressBandwidth  = "kubernetes.io/egress-bandwidth"
)

// Check tells what is wrong with a request for a sandbox, all of it, each with
// the name of its field, as errdefs.ErrInvalidArgument. It has no side effect.
func (s *Store) Check(config *runtimeapi.PodSandboxConfig, handler string) error {
	c := &check{config: config, options: s.options}
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
	return c.err()
}

// check collects what is wrong.
type check struct {
	config  *runtimeapi.PodSandboxConfig
	options Options
	errs    []error
}

func (c *check) bad(field, format string, args ...any) {
	c.errs = append(c.errs, fmt.Errorf("%s: %w", field, fmt.Errorf(format, args...)))
}

func (c *check) err() error {
	if len(c.errs) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %w", errdefs.ErrInvalidArgument, errors.Join(c.errs...))
}

func (c *check) security() *runtimeapi.LinuxSandboxSecurityContext {
	return c.config.GetLinux().GetSecurityContext()
}

func (c *check) handler(handler string) {
	if handler != "" && !slices.Contains(c.options.Handlers, handler) {
		c.bad("runtime_handler", "%q is unknown, this runtime has %q", handler, c.options.Handlers)
	}
}

func (c *check) metadata() {
	m := c.config.GetMetadata()
	if m == nil {
		c.bad("config.metadata", "is missing")
		return
	}
	c.name("config.metadata.name", m.GetName(), true)
	c.name("config.metadata.namespace", m.GetNamespace(), false)
	c.name("config.metadata.uid", m.GetUid(), false)
}

// longestName is the longest name that Kubernetes gives to anything.
const longestName = 253

// name: these go into CNI_ARGS, log lines and the unique name of the sandbox.
func (c *check) name(field, name string, required bool) {
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

func (c *check) hostname() {
	name := c.config.GetHostname()
	switch {
	case len(name) > longestHostname:
		c.bad("config.hostname", "has %d characters, the kernel takes %d", len(name), longestHostname)
	case strings.ContainsFunc(name, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("-._", r))
	}):
		c.bad("config.hostname", "%q has a character that a host name cannot have", name)
	}
}

func (c *check) logDirectory() {
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
func (c *check) dns() {
	dns := c.config.GetDnsConfig()
	for field, words := range map[string][]string{"servers": dns.GetServers(), "searches": dns.GetSearches(), "options": dns.GetOptions()} {
		for i, word := range words {
			if word == "" || strings.ContainsFunc(word, func(r rune) bool { return r <= ' ' || r == 0x7f }) {
				c.bad(fmt.Sprintf("config.dns_config.%s[%d]", field, i), "%q is not one word", word)
			}
		}
	}
}

func (c *check) portMappings() {
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

// texts: labels and annotations are stored as they are, but they are text.
func (c *check) texts(field string, pairs map[string]string) {
	for key, value := range pairs {
		if !utf8.ValidString(key) || !utf8.ValidString(value) {
			c.bad("config."+field, "%q is not UTF-8", key)
		}
	}
}

func (c *check) bandwidth() {
	for _, name := range []string{ingressBandwidth, egressBandwidth} {
		value := c.config.GetAnnotations()[name]
		if value == "" {
			continue
		}
		// The bounds are the kubelet's: 1k to 1P.
		if rate, err := bitsPerSecond(value); err != nil || rate < 1e3 || rate > 1e15 {
			c.bad("config.annotations["+name+"]", "%q is not a rate between 1k and 1P bits per second", value)
		}
	}
}

func (c *check) cgroupParent() {
	if err := oci.CheckCgroupParent(c.config.GetLinux().GetCgroupParent(), c.options.SystemdCgroup); err != nil {
		c.bad("config.linux.cgroup_parent", "%w", err)
	}
}

func (c *check) namespaces() {
	const field = "config.linux.security_context.namespace_options."
	o := c.security().GetNamespaceOptions()
	const pod, container, node = runtimeapi.NamespaceMode_POD, runtimeapi.NamespaceMode_CONTAINER, runtimeapi.NamespaceMode_NODE
	c.mode(field+"network", o.GetNetwork(), pod, node)
	c.mode(field+"pid", o.GetPid(), pod, container, node)
	c.mode(field+"ipc", o.GetIpc(), pod, node)
	if o.GetTargetId() != "" {
		c.bad(field+"target_id", "is for containers, a sandbox has no target")
	}
}

func (c *check) mode(field string, mode runtimeapi.NamespaceMode, allowed ...runtimeapi.NamespaceMode) {
	if !slices.Contains(allowed, mode) {
		c.bad(field, "%v is not one of %v", mode, allowed)
	}
}

func (c *check) user() {
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

func (c *check) id(field string, id *runtimeapi.Int64Value) {
	// The highest value means "no change" to the kernel (setresuid(2)).
	if id != nil && (id.GetValue() < 0 || id.GetValue() >= math.MaxUint32) {
		c.bad(field, "%d is not a user or group id", id.GetValue())
	}
}

func (c *check) sysctls() {
	sysctls := c.config.GetLinux().GetSysctls()
	for name, value := range sysctls {
		field := fmt.Sprintf("config.linux.sysctls[%s]", name)
		if dotted := oci.SysctlName(name); dotted != name {
			if _, twice := sysctls[dotted]; twice {
				c.bad(field, "is there as %s, too", dotted)
			}
		}
		if err := oci.CheckSysctl(c.config, name); err != nil {
			c.bad(field, "%w", err)
		}
		if strings.ContainsRune(value, 0) {
			c.bad(field, "the value has a NUL character")
		}
	}
}

func (c *check) profiles() {
	const field = "config.linux.security_context."
	seccomp, apparmor := oci.SeccompOf(c.security()), c.security().GetApparmor()
	c.profileType(field+"seccomp.profile_type", seccomp)
	c.profileType(field+"apparmor.profile_type", apparmor)
	if err := oci.CheckSeccomp(seccomp); err != nil {
		c.bad(field+"seccomp", "%w", err)
	}
	if err := oci.CheckAppArmor(apparmor, c.options.Machine); err != nil {
		c.bad(field+"apparmor", "%w", err)
	}
}

func (c *check) profileType(field string, profile *runtimeapi.SecurityProfile) {
	if _, known := runtimeapi.SecurityProfile_ProfileType_name[int32(profile.GetProfileType())]; !known {
		c.bad(field, "%d is unknown", profile.GetProfileType())
	}
}

// bitsPerSecond reads a quantity as Kubernetes writes it: a number with one of
// the suffixes k, M, G, T, P (powers of 1000) or Ki, Mi, Gi, Ti, Pi (of 1024).
func bitsPerSecond(text string) (uint64, error) {
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
