package config

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"time"
)

// Check reports everything that cannot work, each with its key: values that are
// invalid, and values that contradict each other.
func (c *Config) Check() error { return errors.Join(c.problems()...) }

func (c *Config) problems() []error {
	var p problems
	p.checkTags(reflect.ValueOf(c).Elem(), "")
	p.checkPaths(c)
	p.checkCgroup(c)
	if _, err := c.Level(); err != nil {
		p.add("log_level", "%v: write debug, info, warn or error", err)
	}
	if c.LogFormat != "text" && c.LogFormat != "json" {
		p.add("log_format", "%q is neither text nor json", c.LogFormat)
	}
	p.checkDefaultNetwork(&c.DefaultNetwork)
	p.checkStreaming(c)
	p.checkTracing(&c.Tracing)
	p.checkLimits(&c.Limits)
	p.checkRuntimes(c)
	p.checkNRI(&c.NRI)
	return p
}

func (p *problems) checkTracing(t *Tracing) {
	if t.Protocol != "grpc" && t.Protocol != "http" {
		p.add("tracing.protocol", "%q is neither grpc nor http", t.Protocol)
	}
}

// problems collects what is wrong.
type problems []error

func (p *problems) add(key, format string, values ...any) {
	*p = append(*p, fmt.Errorf(key+": "+format, values...))
}

const (
	// longestSocket: sockaddr_un (unix(7)) holds 107 characters and a NUL.
	longestSocket = 107
	// belowState is the longest path of a socket below state:
	// shims/BUILD/stream.sock.
	belowState = len("/shims/") + 16 + len("/stream.sock")
)

func (p *problems) checkPaths(c *Config) {
	if len(c.Socket) > longestSocket {
		p.add("socket", "%q is longer than the %d characters that a unix socket can have", c.Socket, longestSocket)
	}
	if most := longestSocket - belowState; len(c.State) > most {
		p.add("state", "%q is longer than %d characters: the sockets below it would be longer than the %d that a unix socket can have", c.State, most, longestSocket)
	}
	for key, path := range map[string]string{"root": c.Root, "state": c.State} {
		if filepath.Clean(path) == "/" {
			p.add(key, "%q is the root directory of the machine: write a directory that is minicri's alone", path)
		}
	}
	// Overlay takes the first three in its options apart, CNI's IPAM plugins and the
	// runtimes' command lines the colon.
	for key, path := range map[string]string{"root": c.Root, "state": c.State} {
		if i := strings.IndexAny(path, `:,\`); i >= 0 {
			p.add(key, "%q has %q in it, which mount options and lists of paths take apart: write a path without it", path, path[i])
		}
	}
	if filepath.Clean(c.Root) == filepath.Clean(c.State) {
		p.add("state", "%q is root, too: a reboot may remove one and must not remove the other", c.State)
	}
}

func (p *problems) checkCgroup(c *Config) {
	slice := strings.HasSuffix(c.CgroupParent, ".slice")
	switch c.CgroupDriver {
	case "systemd":
		if c.CgroupParent != "" && !slice {
			p.add("cgroup_parent", "%q is not a slice, but cgroup_driver is systemd", c.CgroupParent)
		}
	case "cgroupfs":
		if c.CgroupParent != "" && !filepath.IsAbs(c.CgroupParent) {
			p.add("cgroup_parent", "%q is not an absolute path, but cgroup_driver is cgroupfs", c.CgroupParent)
		}
	case "":
		if c.CgroupParent != "" && !slice && !filepath.IsAbs(c.CgroupParent) {
			p.add("cgroup_parent", "%q is neither an absolute path nor a slice", c.CgroupParent)
		}
	default:
		p.add("cgroup_driver", "%q is neither cgroupfs nor systemd", c.CgroupDriver)
	}
}

var (
	// The names of CNI networks: libcni's utils.ValidateNetworkName.
	networkName = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.\-]*$`)
	// The names of interfaces: dev_valid_name of the kernel, IFNAMSIZ with a NUL.
	linkName = regexp.MustCompile(`^[^\s/:]{1,15}$`)
)

func (p *problems) checkDefaultNetwork(d *DefaultNetwork) {
	const key = "default_network."
	if !networkName.MatchString(d.Name) {
		p.add(key+"name", "%q is no name of a CNI network: letters, digits, '_', '.' and '-', the first one a letter or a digit", d.Name)
	}
	if !linkName.MatchString(d.Bridge) || d.Bridge == "." || d.Bridge == ".." {
		p.add(key+"bridge", "%q is no name of a network interface: 1 to 15 characters without spaces, '/' and ':'", d.Bridge)
	}
	if d.Subnet == "" {
		return
	}
	families := map[bool]int{}
	for subnet := range strings.SplitSeq(d.Subnet, ",") {
		prefix, err := netip.ParsePrefix(strings.TrimSpace(subnet))
		if err != nil {
			p.add(key+"subnet", "%v: write it as in '10.88.0.0/16' or '10.88.0.0/16,fd00::/64'", err)
			return
		}
		if prefix.Addr().BitLen()-prefix.Bits() < 2 {
			p.add(key+"subnet", "%q has no address for a pod beside the bridge's: it needs at least /%d", subnet, prefix.Addr().BitLen()-2)
		}
		families[prefix.Addr().Is4()]++
	}
	if families[true] > 1 || families[false] > 1 {
		p.add(key+"subnet", "%q has two subnets of one address family", d.Subnet)
	}
}

func (p *problems) checkStreaming(c *Config) {
	s := &c.Streaming
	if (s.TLSCert == "") != (s.TLSKey == "") {
		p.add("streaming.tls_cert, streaming.tls_key", "one is of no use without the other")
	}
	if (c.MetricsCert == "") != (c.MetricsKey == "") {
		p.add("metrics_tls_cert, metrics_tls_key", "one is of no use without the other")
	}
	if s.SelfSigned && s.TLSCert != "" {
		p.add("streaming.tls_self_signed", "streaming.tls_cert names a certificate already")
	}
	if c.Metrics != "" && c.Metrics == s.Address && !strings.HasSuffix(s.Address, ":0") {
		p.add("metrics_address", "%q is streaming.address, too: two servers need two addresses", c.Metrics)
	}
}

// checkLimits refuses a limit that another one always ends first.
func (p *problems) checkLimits(l *Limits) {
	for _, pair := range []struct {
		part, whole           string
		partLimit, wholeLimit Duration
	}{
		{"cni_add", "run", l.CNIAdd, l.Run},
		{"cni_del", "destroy", l.CNIDel, l.Destroy},
		{"kill", "destroy", l.Kill, l.Destroy},
		{"retry_first", "retry_most", l.RetryFirst, l.RetryMost},
	} {
		if pair.partLimit > pair.wholeLimit {
			p.add("limits."+pair.part, "%v is longer than limits.%s, which is %v and ends it first: set both",
				time.Duration(pair.partLimit), pair.whole, time.Duration(pair.wholeLimit))
		}
	}
}

// handlerName is the form of RuntimeClass.handler: a DNS label (RFC 1123).
var handlerName = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

// checkRuntimes refuses a handler whose pods would run by something else than
// its type says.
func (p *problems) checkRuntimes(c *Config) {
	if _, known := c.Runtimes[c.DefaultRuntime]; c.DefaultRuntime != "" && !known {
		p.add("default_runtime", "there is no table runtimes.%s", c.DefaultRuntime)
	}
	for _, name := range c.Handlers() {
		key := "runtimes." + name
		if !handlerName.MatchString(name) {
			p.add(key, "no RuntimeClass can name this handler: lower-case letters, digits and '-', at most 63")
		}
		switch kind := c.Runtimes[name].Type; {
		case kind == "":
			p.add(key+".type", "it is missing: write type = %q", Builtin)
		case !slices.Contains(runtimeTypes(), kind):
			p.add(key+".type", "this build has no type %q, only %q: pods of this handler would run without what its name promises", kind, runtimeTypes())
		case kind != Builtin && c.Runtimes[name].Path == "":
			p.add(key+".path", "it is missing: type %q needs the path of a program", kind)
		case kind == Builtin && (c.Runtimes[name].Path != "" || len(c.Runtimes[name].Args) > 0):
			p.add(key+".path", "type %q runs no program: leave out path and args, or write type = %q", kind, OCI)
		}
		if c.Runtimes[name].SandboxPerContainer && c.Runtimes[name].Type != OCI {
			p.add(key+".sandbox_per_container", "it is for the type %q alone: leave it out", OCI)
		}
		p.checkTags(reflect.ValueOf(c.Runtimes[name]), key+".")
	}
}

// runtimeTypes are the types of runtime handlers that this build has.
func runtimeTypes() []string { return []string{Builtin, OCI} }
