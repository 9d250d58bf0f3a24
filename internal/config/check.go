package config

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/distribution/reference"
	"github.com/docker/go-units"
)

// Check reports all values that are invalid or contradict each other, each with its key.
func (c *Config) Check() error { return errors.Join(c.problems()...) }

func (c *Config) problems() []error {
	var p problems
	eachField(reflect.ValueOf(c).Elem(), "", p.checkField)
	p.checkPaths(c)
	if parent := c.CgroupParent; parent != "" && !filepath.IsAbs(parent) && (c.CgroupDriver == "cgroupfs" || !strings.HasSuffix(parent, ".slice")) {
		p.add("cgroup_parent", "%q is not an absolute path, nor a slice for the driver systemd", parent)
	}
	if _, err := c.Level(); err != nil {
		p.add("log_level", "%v: write debug, info, warn or error", err)
	}
	if _, err := ParseSubnets(c.DefaultNetwork.Subnet); c.DefaultNetwork.Subnet != "" && err != nil {
		p.add("default_network.subnet", "%v", err)
	}
	p.checkStreaming(c)
	p.checkLimits(&c.Limits)
	p.checkRuntimes(c)
	return p
}

type problems []error

func (p *problems) add(key, format string, values ...any) {
	*p = append(*p, fmt.Errorf(key+": "+format, values...))
}

func (p *problems) checkField(key string, field reflect.Value, tag reflect.StructTag) {
	switch value := field.Interface().(type) {
	case Duration:
		p.checkDuration(key, time.Duration(value), tag)
	case int, int64:
		if least, err := strconv.ParseInt(tag.Get("least"), 10, 64); err == nil && field.Int() < least {
			p.add(key, "%d is less than %d", value, least)
		}
		if most, err := strconv.ParseInt(tag.Get("most"), 10, 64); err == nil && field.Int() > most {
			p.add(key, "%d is more than %d", value, most)
		}
	case string:
		p.checkText(key, value, tag.Get("need"))
	case []string:
		names, need := map[string]bool{}, tag.Get("need")
		for _, text := range value {
			p.checkText(key, text, need)
			// Of two values for one name, one would have no effect.
			name, _, _ := strings.Cut(text, "=")
			if names[name] && slices.Contains([]string{"ulimit", "pair", "sysctl"}, need) {
				p.add(key, "%q is named twice", name)
			}
			names[name] = true
		}
	}
}

// checkDuration refuses what is too short to be meant: TOML reads a number without a unit as nanoseconds.
func (p *problems) checkDuration(key string, value time.Duration, tag reflect.StructTag) {
	zero, zeroAllowed := tag.Lookup("zero")
	switch {
	case value >= time.Millisecond, value == 0 && zeroAllowed:
	case zeroAllowed:
		p.add(key, "%v is too short: write a duration with its unit, as in '5s', or '0s' for %s", value, zero)
	default:
		p.add(key, "%v is too short: write a duration with its unit, as in '5s'", value)
	}
}

// forms are the kinds of texts that have a pattern, with what is said of others.
var forms = map[string]struct {
	pattern *regexp.Regexp
	refused string
}{
	"pair": {regexp.MustCompile(`^[^=]+=`), "is not a name and a value with '=' between them"},
	// A path below /proc/sys in either form of sysctl.d(5).
	"sysctl": {regexp.MustCompile(`^[^\s./=]+([./][^\s./=]+)+=`), "is not the name of a kernel parameter and its value: write it as in 'net.ipv4.tcp_syncookies=1'"},
	// Those that the machine does not have are left out.
	"capability": {regexp.MustCompile(`^(CAP_)?[A-Z_]+$`), "is no capability: write it as in 'CAP_CHOWN'"},
	"profile":    {regexp.MustCompile(`^(runtime/default|unconfined|localhost/.+)$`), "is neither 'runtime/default', 'unconfined' nor 'localhost/' and a profile"},
	// libcni's utils.ValidateNetworkName.
	"network": {regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.\-]*$`), "is no name of a CNI network: letters, digits, '_', '.' and '-', the first one a letter or a digit"},
	// dev_valid_name of the kernel, IFNAMSIZ with a NUL.
	"link": {regexp.MustCompile(`^([^\s/:.][^\s/:]{0,14}|\.[^\s/:.][^\s/:]{0,13}|\.\.[^\s/:]{1,13})$`), "is no name of a network interface: 1 to 15 characters without spaces, '/' and ':'"},
	// With the index or without, as NRI's library takes it (api.CheckPluginName).
	"plugin": {regexp.MustCompile(`^([0-9]{2}-)?[A-Za-z0-9_.-]+$`), "is no name of a plugin: write it as in 'dranet' or '10-dranet'"},
}

func (p *problems) checkText(key, text, need string) {
	need, optional := strings.CutSuffix(need, "?")
	if text == "" && optional {
		return
	}
	if strings.ContainsRune(text, 0) { // no system call could pass it on
		p.add(key, "%q contains a NUL", text)
		return
	}
	if form, is := forms[need]; is && !form.pattern.MatchString(text) {
		p.add(key, "%q %s", text, form.refused)
	}
	if words := strings.Split(need, " or "); len(words) > 1 && !slices.Contains(words, text) {
		p.add(key, "%q is not %s", text, need)
	}
	switch need {
	case "path":
		if !filepath.IsAbs(text) {
			p.add(key, "%q is not an absolute path", text)
		}
	case "paths":
		for _, path := range filepath.SplitList(cmp.Or(text, ":")) {
			p.checkText(key, path, "path")
		}
	case "endpoint":
		if _, port, err := net.SplitHostPort(text); err != nil {
			p.add(key, "%v: write it as in '127.0.0.1:9440'", err)
		} else if _, err := net.LookupPort("tcp", port); err != nil || key == "tracing.endpoint" && strings.Contains(text, "%") { // an escape for gRPC
			p.add(key, "%q is no address with a valid port: write it as in '127.0.0.1:9440'", text)
		}
	case "ulimit":
		if _, err := units.ParseUlimit(text); err != nil {
			p.add(key, "%v: write it as in 'nofile=1024:524288'", err)
		}
	case "pattern":
		if _, err := path.Match(text, ""); err != nil || text == "" {
			p.add(key, "%q is not a pattern as path.Match of Go has it", text)
		}
	case "reference":
		if _, err := reference.ParseDockerRef(text); err != nil {
			p.add(key, "%q is no image reference: %v", text, err)
		}
	}
}

const longestSocket = 107 // sockaddr_un (unix(7)) has room for these and a NUL

func (p *problems) checkPaths(c *Config) {
	taken := map[string]string{
		resolved(c.Root): "root, too", resolved(c.State + "/debug.sock"): "the daemon's own", resolved(c.State + "/nri.sock"): "the daemon's own",
	}
	for _, one := range [][2]string{{"state", c.State}, {"socket", c.Socket}, {"nri.socket", c.NRI.Socket}} {
		key, path := one[0], one[1]
		used := key != "nri.socket" || c.NRI.Enabled
		switch owner := taken[resolved(path)]; {
		case key != "state" && len(path) > longestSocket:
			p.add(key, "%q is longer than the %d characters that a unix socket can have", path, longestSocket)
		case key != "state" && used && strings.HasSuffix(path, "/"):
			p.add(key, "%q is a directory", path)
		case owner != "" && used:
			p.add(key, "%q is %s", path, owner)
		}
		taken[resolved(path)] = key + ", too"
	}
	if most := longestSocket - len("/shims/0123456789abcdef/stream.sock"); len(c.State) > most {
		p.add("state", "%q is longer than %d characters: the sockets below it would be longer than the %d that a unix socket can have", c.State, most, longestSocket)
	}
	for key, path := range map[string]string{"root": c.Root, "state": c.State, "netns_dir": c.NetnsDir} {
		if filepath.Clean(path) == "/" {
			p.add(key, "%q is the root directory of the machine: write a directory that is minicri's alone", path)
		}
		if !utf8.ValidString(path) { // as protobuf and JSON need it, on the way to the supervisor
			p.add(key, "%q is not UTF-8", path)
		}
		// Overlay's options take these apart, and libcontainer its list of namespaces; CNI's IPAM plugins and
		// runtimes' command lines the colon.
		if i := strings.IndexAny(path, `:,\`); i >= 0 {
			p.add(key, "%q has %q in it, which mount options and lists of paths take apart: write a path without it", path, path[i])
		}
	}
}

// ParseSubnets parses the subnets of a network, separated by commas: one of each address family.
func ParseSubnets(subnets string) (prefixes []netip.Prefix, err error) {
	for subnet := range strings.SplitSeq(subnets, ",") {
		prefix, err := netip.ParsePrefix(strings.TrimSpace(subnet))
		if err != nil {
			return nil, fmt.Errorf("%w: write it as in '10.88.0.0/16' or '10.88.0.0/16,fd00::/64'", err)
		}
		if prefix.Addr().BitLen()-prefix.Bits() < 2 {
			return nil, fmt.Errorf("%q has no address for a pod beside the bridge's: it needs at least /%d", subnet, prefix.Addr().BitLen()-2)
		}
		if slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Addr().Is4() == prefix.Addr().Is4() }) {
			return nil, fmt.Errorf("%q has two subnets of one address family", subnets)
		}
		prefixes = append(prefixes, prefix.Masked())
	}
	return prefixes, nil
}

func (p *problems) checkStreaming(c *Config) {
	s := &c.Streaming
	for keys, files := range map[string][2]string{"streaming.tls_cert, streaming.tls_key": {s.TLSCert, s.TLSKey}, "metrics_tls_cert, metrics_tls_key": {c.MetricsCert, c.MetricsKey}} {
		if (files[0] == "") != (files[1] == "") {
			p.add(keys, "one is of no use without the other")
		}
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

// checkRuntimes refuses a handler whose pods would not run by what its type says.
func (p *problems) checkRuntimes(c *Config) {
	if _, known := c.Runtimes[c.DefaultRuntime]; c.DefaultRuntime != "" && !known {
		p.add("default_runtime", "there is no table runtimes.%s", c.DefaultRuntime)
	}
	types := []string{Builtin, OCI}
	for _, name := range c.Handlers() {
		key, r := "runtimes."+name, c.Runtimes[name]
		if !handlerName.MatchString(name) {
			p.add(key, "no RuntimeClass can name this handler: lower-case letters, digits and '-', at most 63")
		}
		switch {
		case r.Type == "":
			p.add(key+".type", "it is missing: write type = %q", Builtin)
		case !slices.Contains(types, r.Type):
			p.add(key+".type", "this build has no type %q, only %q: pods of this handler would run without what its name promises", r.Type, types)
		case r.Type == OCI && r.Path == "":
			p.add(key+".path", "it is missing: type %q needs the path of a program", OCI)
		case r.Type == Builtin && (r.Path != "" || len(r.Args) > 0):
			p.add(key+".path", "type %q runs no program: leave out path and args, or write type = %q", Builtin, OCI)
		}
		if r.SandboxPerContainer && r.Type != OCI {
			p.add(key+".sandbox_per_container", "it is for the type %q alone: leave it out", OCI)
		}
	}
}
