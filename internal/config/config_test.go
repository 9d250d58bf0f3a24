package config

import (
	"bytes"
	"errors"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/test/harness"
)

func TestWhatIsWrittenIsReadBack(t *testing.T) {
	changed := Default()
	changed.CNIBin, changed.CgroupDriver, changed.Runtimes = "/a:/b", "systemd", map[string]Runtime{
		"runc": Default().Runtimes["runc"],
		"x":    {Type: Builtin, Args: []string{}, PodAnnotations: []string{}, ContainerAnnotations: []string{}},
		"y":    {Type: OCI, Path: "/runc", Args: []string{"--debug"}, PodAnnotations: []string{"a/*"}, ContainerAnnotations: []string{"b"}, BaseSpec: "/base", PrivilegedWithoutHostDevices: true, CNIConf: "/net.d"},
	}
	changed.DefaultNetwork = DefaultNetwork{Enabled: true, Name: "n", Bridge: "b", Subnet: "10.0.0.0/24,fd00::/64", DataDir: "/d"}
	changed.Limits.GC, changed.Limits.RetryFirst = 0, Duration(1500*time.Millisecond)
	for name, config := range map[string]*Config{"the defaults": Default(), "others": changed} {
		var text bytes.Buffer
		harness.Check(t, config.Write(&text))
		got := read(t, "--config", file(t, text.String()))
		err := got.Strict()
		harness.Want(t, err == nil, "%s: %v\n%s", name, err, text.String())
		harness.Want(t, reflect.DeepEqual(got.Config, config), "%s: wrote\n%+v\nread\n%+v", name, config, got.Config)
	}
}

// A person finds every key, with a comment, in what "config default" prints.
func TestEveryKeyHasAComment(t *testing.T) {
	var text bytes.Buffer
	harness.Check(t, Default().Write(&text))
	for _, key := range Keys() {
		name := key.Name[strings.LastIndex(key.Name, ".")+1:]
		harness.Want(t, key.Comment != "", "%s is not in the printed defaults", key.Name)
		harness.Want(t, key.Table || strings.Contains(text.String(), name),
			"%s is not in the printed defaults", key.Name)
		harness.Want(t, strings.Contains(text.String(), key.Comment), "%s is not in the printed defaults", key.Name)
	}
}

func TestReadFileSaysWhere(t *testing.T) {
	for _, test := range []struct{ name, text, says string }{
		{"unknown key", "socket = '/a'\n\nsockt = '/b'\n", ":3: unknown key \"sockt\""},
		{"unknown key of a table", "[limits]\nrun = '1s'\nrum = '1s'\n", ":3: unknown key \"limits.rum\""},
		{"unknown table", "[limit]\nrun = '1s'\n", "unknown key \"limit.run\""},
		{"number for text", "root = '/r'\nsocket = 7\n", ":2:"},
		{"text for a number", "[limits]\ndetach_tries = 'five'\n", ":2:"},
		{"no duration", "[limits]\nrun = '5 minutes'\n", ":2:"},
		{"text for a list", "[images]\npinned = 'a'\n", ":2:"},
		{"no TOML", "socket = '/a'\nroot /b\n", ":2:"},
		{"key twice", "root = '/a'\nroot = '/b'\n", ""},
	} {
		path := file(t, test.text)
		err := read(t, "--config", path).Strict()
		harness.Need(t, err != nil, "%s: %v, want %s%s", test.name, err, path, test.says)
		harness.Want(t, strings.HasPrefix(err.Error(), path+":"), "%s: %v, want %s%s", test.name, err, path, test.says)
		harness.Want(t, strings.Contains(err.Error(), test.says), "%s: %v, want %s%s", test.name, err, path, test.says)
	}
	err := read(t, "--config", filepath.Join(t.TempDir(), "missing")).Strict()
	harness.Want(t, errors.Is(err, fs.ErrNotExist), "a file that is not there: %v", err)
}

// Defaults, file, drop-ins by name, flags: what comes later counts, and what it does not name stays.
func TestOrder(t *testing.T) {
	path := file(t, "root = '/file'\nstate = '/file'\nnetns_dir = '/file'\nlog_level = 'warn'\n[limits]\nrun = '4m'\nkill = '12s'\n")
	dropIns := path + ".d"
	harness.Check(t, os.Mkdir(dropIns, 0o700))
	put(t, filepath.Join(dropIns, "20-later.toml"), "state = '/20'\nnetns_dir = '/20'\n")
	put(t, filepath.Join(dropIns, "10-first.toml"), "state = '/10'\nnetns_dir = '/10'\n[limits]\nkill = '13s'\n")
	put(t, filepath.Join(dropIns, "30-not.toml.bak"), "no TOML")
	got, err := load([]string{"--config", path, "--netns-dir", "/flag", "--log-level=debug"})
	harness.Check(t, err)
	want := Default()
	want.Root, want.State, want.NetnsDir, want.LogLevel = "/file", "/20", "/flag", "debug"
	want.Limits.Run, want.Limits.Kill = Duration(4*time.Minute), Duration(13*time.Second)
	harness.Want(t, reflect.DeepEqual(got, want), "got\n%+v\nwant\n%+v", got, want)
	put(t, filepath.Join(dropIns, "15-bad.toml"), "\n\nroot = 7\n")
	_, err = load([]string{"--config", path})
	harness.WantError(t, err, "15-bad.toml:3:")
	harness.Check(t, unix.Mkfifo(filepath.Join(dropIns, "17-fifo.toml"), 0o600))
	_, err = load([]string{"--config", path})
	harness.WantError(t, err, "17-fifo.toml is no regular file")
}

func TestEveryFlagIsAKey(t *testing.T) {
	arguments := []string{"--config", file(t, "")}
	for _, flag := range []string{"socket", "root", "state", "netns-dir", "cni-conf-dir", "cni-bin-dir", "shim"} {
		arguments = append(arguments, "--"+flag, "/"+flag)
	}
	got, err := load(append(arguments, "--log-level", "error"))
	harness.Check(t, err)
	want := Default()
	want.Socket, want.Root, want.State, want.NetnsDir = "/socket", "/root", "/state", "/netns-dir"
	want.CNIConf, want.CNIBin, want.Shim, want.LogLevel = "/cni-conf-dir", "/cni-bin-dir", "/shim", "error"
	harness.Want(t, reflect.DeepEqual(got, want), "got\n%+v\nwant\n%+v", got, want)
}

func TestLoadThatFails(t *testing.T) {
	empty := file(t, "")
	for _, test := range []struct {
		arguments []string
		says      string
	}{
		{[]string{"--config", "/nowhere/config.toml"}, "/nowhere/config.toml"},
		{[]string{"--config", empty, "--sockt", "/a"}, "sockt"},
		{[]string{"--config", empty, "--root"}, "root"},
		{[]string{"--config", empty, "--root", "relative"}, "root:"},
	} {
		_, err := load(test.arguments)
		harness.Want(t, err != nil && strings.Contains(err.Error(), test.says), "load(%q) = %v, want an error that says %q", test.arguments, err, test.says)
	}
}

func TestCheck(t *testing.T) {
	for says, change := range map[string]func(*Config){
		"socket: \"a.sock\"":                      func(c *Config) { c.Socket = "a.sock" },
		"socket: \"/aaa":                          func(c *Config) { c.Socket = "/" + strings.Repeat("a", 107) },
		"cgroup_driver: \"v2\"":                   func(c *Config) { c.CgroupDriver = "v2" },
		"cgroup_parent: \"pods.slice\"":           func(c *Config) { c.CgroupDriver, c.CgroupParent = "cgroupfs", "pods.slice" },
		"log_level:":                              func(c *Config) { c.LogLevel = "loud" },
		"limits.run: 0s":                          func(c *Config) { c.Limits.Run = 0 },
		"limits.detach_tries: 0":                  func(c *Config) { c.Limits.DetachTries = 0 },
		"state: \"/aaa":                           func(c *Config) { c.State = "/" + strings.Repeat("a", 72) },
		"state: \"/var/lib/minicri/\" is root":    func(c *Config) { c.State = c.Root + "/" },
		"root: \"/data:1/minicri\" has ':' in it": func(c *Config) { c.Root = "/data:1/minicri" },
		"state: \"/run/a,b\" has ','":             func(c *Config) { c.State = "/run/a,b" },
		"netns_dir: \"/run/a,b\" has ','":         func(c *Config) { c.NetnsDir = "/run/a,b" },
		`state: "/a\xff" is not UTF-8`:            func(c *Config) { c.State = "/a\xff" },
		"cni_bin_dir: \"b\"":                      func(c *Config) { c.CNIBin = "/a:b" },
		"cni_bin_dir: \"\"":                       func(c *Config) { c.CNIBin = "" },
		"metrics_address: ":                       func(c *Config) { c.Metrics = "9440" },
		"metrics_address: \"a:b\"":                func(c *Config) { c.Metrics = "a:b" },
		"metrics_address: \"[::1]:9\"":            func(c *Config) { c.Metrics, c.Streaming.Address = "[::1]:9", "[::1]:9" },
		"root: \"//\" is the root directory":      func(c *Config) { c.Root = "//" },
		"default_sysctls: \"a.b\" is named":       func(c *Config) { c.DefaultSysctls = []string{"a.b=1", "a.c=1", "a.b=2"} },
		`default_sysctls: "../../etc/x=1" is not`: func(c *Config) { c.DefaultSysctls = []string{"../../etc/x=1"} },
		`default_sysctls: "net..x=1" is not`:      func(c *Config) { c.DefaultSysctls = []string{"net..x=1"} },
		`default_sysctls: "x=1" is not`:           func(c *Config) { c.DefaultSysctls = []string{"x=1"} },
		`default_network.bridge: "b\x00"`:         func(c *Config) { c.DefaultNetwork.Bridge = "b\x00" },
		"default_network.subnet: \"10.0.0.0/3":    func(c *Config) { c.DefaultNetwork.Subnet = "10.0.0.0/31" },
		"cgroup_parent: \"pods\"":                 func(c *Config) { c.CgroupParent = "pods" },
		"default_network.name: ":                  func(c *Config) { c.DefaultNetwork.Name = "a b" },
		"default_network.bridge: ":                func(c *Config) { c.DefaultNetwork.Bridge = "sixteen-letters-" },
		"default_network.subnet: netip":           func(c *Config) { c.DefaultNetwork.Subnet = "10.0.0.0" },
		"default_network.subnet: \"10.":           func(c *Config) { c.DefaultNetwork.Subnet = "10.0.0.0/24,10.1.0.0/24" },
		"images.pinned: \"UPPER\"":                func(c *Config) { c.Images.Pinned = []string{"UPPER"} },
		"streaming.tls_cert, ":                    func(c *Config) { c.Streaming.TLSKey = "/key" },
		"streaming.tls_self_signed: ":             func(c *Config) { s := &c.Streaming; s.SelfSigned, s.TLSCert, s.TLSKey = true, "/c", "/k" },
		"limits.check_period: 5ns":                func(c *Config) { c.Limits.Check = 5 },

		"limits.cni_add: 3m0s is longer than limits.run, which is 1m0s":                   func(c *Config) { c.Limits.Run = Duration(time.Minute) },
		"limits.cni_del: 1m0s is longer than limits.destroy, which is 30s":                func(c *Config) { c.Limits.Destroy = Duration(30 * time.Second) },
		"limits.kill: 2m0s is longer than limits.destroy":                                 func(c *Config) { c.Limits.Kill = Duration(2 * time.Minute) },
		"limits.retry_first: 10m0s is longer than limits.retry_most":                      func(c *Config) { c.Limits.RetryFirst = Duration(10 * time.Minute) },
		"runtimes.kata.cni_conf_dir: \"net.d\"":                                           func(c *Config) { c.Runtimes["kata"] = Runtime{Type: Builtin, CNIConf: "net.d"} },
		"runtimes.kata.type: this build has no type \"wasm\", only [\"builtin\" \"oci\"]": func(c *Config) { c.Runtimes["kata"] = Runtime{Type: "wasm"} },
		"runtimes.kata.sandbox_per_container: it is for the type \"oci\" alone":           func(c *Config) { c.Runtimes["kata"] = Runtime{Type: Builtin, SandboxPerContainer: true} },
		"runtimes.kata.type: this build has no type \"shim\"":                             func(c *Config) { c.Runtimes["kata"] = Runtime{Type: "shim", Path: "/kata"} },
		"runtimes.kata.type: it is missing":                                               func(c *Config) { c.Runtimes["kata"] = Runtime{} },
		"runtimes.runc.path: it is missing":                                               func(c *Config) { c.Runtimes["runc"] = Runtime{Type: OCI} },
		"runtimes.runc.path: \"runc\" is not an absolute path":                            func(c *Config) { c.Runtimes["runc"] = Runtime{Type: OCI, Path: "runc"} },
		"runtimes.runc.path: type \"builtin\" runs no program":                            func(c *Config) { c.Runtimes["runc"] = Runtime{Type: Builtin, Path: "/runc"} },
		"runtimes.Kata: no RuntimeClass can name":                                         func(c *Config) { c.Runtimes["Kata"] = Runtime{Type: Builtin} },
	} {
		c := Default()
		change(c)
		err := c.Check()
		harness.Want(t, err != nil && strings.HasPrefix(err.Error(), says), "Check = %v, want an error that begins with %q", err, says)
	}
	for name, change := range map[string]func(*Config){
		"the longest socket":     func(c *Config) { c.Socket = "/" + strings.Repeat("a", 106) },
		"no garbage collection":  func(c *Config) { c.Limits.GC = 0 },
		"a slice":                func(c *Config) { c.CgroupDriver, c.CgroupParent = "systemd", "pods.slice" },
		"a path for cgroupfs":    func(c *Config) { c.CgroupDriver, c.CgroupParent = "cgroupfs", "/pods" },
		"a level in other case":  func(c *Config) { c.LogLevel = "WARN" },
		"a shim beside minicri":  func(c *Config) { c.Shim = "" },
		"no handler but default": func(c *Config) { c.Runtimes = nil },
		"a handler by any name":  func(c *Config) { c.Runtimes["my-handler2"] = Runtime{Type: Builtin} },
		"metrics anywhere":       func(c *Config) { c.Metrics = ":9440" },
		"CHECK periodically":     func(c *Config) { c.Limits.Check = Duration(time.Minute) },
		"no time limit for DEL":  func(c *Config) { c.Limits.DetachTime = 0 },
		"dual stack":             func(c *Config) { c.DefaultNetwork.Subnet = "10.1.0.0/16, fd00::/64" },
		"names of kernel parameters": func(c *Config) {
			c.DefaultSysctls = []string{"net.ipv4.tcp_syncookies=1", "net/ipv4/conf/eth0.1/arp_filter=1", "net.ipv4.conf.eth0/2.arp_filter=1", "kernel.sem=250 32000 32 128"}
		},
		"GC again soon after GC": func(c *Config) { c.Limits.GC = Duration(time.Second) }, // the pause is from its end
		"the longest state":      func(c *Config) { c.State = "/" + strings.Repeat("a", 71) },
	} {
		c := Default()
		change(c)
		harness.Same(t, name, c.Check(), nil)
	}
}

// Paths are resolved once, at the load: what is made of them later has no link in it.
func TestLoadResolvesLinks(t *testing.T) {
	dir, err := os.MkdirTemp("/tmp", "c") // state has to be short
	harness.Check(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	data := filepath.Join(dir, "d")
	for _, err := range []error{
		os.MkdirAll(filepath.Join(data, "minicri"), 0o755), os.Symlink(filepath.Join(data, "minicri"), filepath.Join(dir, "root")),
		os.Symlink(data, filepath.Join(dir, "run")), os.Symlink(filepath.Join(dir, "nowhere"), filepath.Join(dir, "dangling")),
	} {
		harness.Check(t, err)
	}
	c, err := load([]string{"--config", os.DevNull, "--root", filepath.Join(dir, "root"), "--state", filepath.Join(dir, "run", "not"), "--netns-dir", filepath.Join(dir, "dangling")})
	harness.Check(t, err)
	harness.Want(t, c.Root == filepath.Join(data, "minicri"),
		"root %s, state %s, netns_dir %s", c.Root, c.State, c.NetnsDir)
	harness.Want(t, c.State == filepath.Join(data, "not"),
		"root %s, state %s, netns_dir %s", c.Root, c.State, c.NetnsDir)
	harness.Want(t, c.NetnsDir == filepath.Join(dir, "dangling"),
		"root %s, state %s, netns_dir %s", c.Root, c.State, c.NetnsDir)
}

// Each duration needs a unit and each number a least and a largest value: a field
// without a rule of its own is found by its type.
func TestEveryNumberIsChecked(t *testing.T) {
	c := Default()
	harness.Check(t, c.Check())
	eachField(reflect.ValueOf(c).Elem(), "", func(key string, field reflect.Value, _ reflect.StructTag) {
		if !field.CanInt() {
			return
		}
		before := field.Int()
		for value, says := range map[int64]string{-5: ": -5", math.MaxInt64: ": 9223372036854775807 is more than "} {
			field.SetInt(value)
			if err := c.Check(); (value < 0 || field.Type() != reflect.TypeFor[Duration]()) && (err == nil || !strings.Contains(err.Error(), key+says)) {
				t.Errorf("%s = %d: %v", key, value, err)
			}
		}
		field.SetInt(before)
	})
}

// A drop-in that is broken costs its own values alone, and what is refused is named with
// file and line; what is unknown is no reason to refuse a start.
func TestBrokenPartsDisableThemselvesOnly(t *testing.T) {
	path := file(t, "socket = '/s'\n\nsockt = '/x'\nstate = '/run/a'\nlog_level = 'loud'\nruntimes.x = { type = 'oci', path = '/x' }\n")
	harness.Check(t, os.Mkdir(path+".d", 0o700))
	bad := filepath.Join(path+".d", "10-bad.toml")
	put(t, bad, "root = '/bad'\npids_limit = 'many'\n")
	put(t, filepath.Join(path+".d", "20-good.toml"), "root = '/good'\n[limits]\nkill = '20s'\n")
	l := read(t, "--config", path, "--state", "/run/b")
	harness.Want(t, l.Socket == "/s", "%+v", l.Config)
	harness.Want(t, l.State == "/run/b", "%+v", l.Config)
	harness.Want(t, l.Root == "/good", "%+v", l.Config)
	harness.Want(t, l.LogLevel == "info", "%+v", l.Config)
	harness.Want(t, l.PidsLimit == 0, "%+v", l.Config)
	harness.Want(t, len(l.Unknown) == 1 && strings.HasPrefix(l.Unknown[0].Error(), path+":3: unknown key \"sockt\""), "unknown: %v", l.Unknown)
	harness.Need(t, len(l.Broken) == 2, "broken: %v", l.Broken)
	harness.Want(t, strings.HasPrefix(l.Broken[0].Error(), bad+":2:"), "broken: %v", l.Broken)
	harness.Want(t, strings.HasPrefix(l.Broken[1].Error(), path+":5: log_level: "), "broken: %v", l.Broken)
	for key, want := range map[string]string{
		"socket": path + ":1", "state": "--state", "root": filepath.Join(path+".d", "20-good.toml") + ":1", "limits.kill": filepath.Join(path+".d", "20-good.toml") + ":3",
		"runtimes.x.path": path + ":6", "limits.run": "",
	} {
		harness.Same(t, key+" is from", l.Sources[key], want)
	}
	_, err := load([]string{"--config", file(t, "sockt = '/x'\n")})
	harness.Want(t, err == nil, "a start with an unknown key: %v", err)
}

// One look at a file reports all of its faults by the keys' names, in the order of lines, and keeps the other values.
func TestAllFaultsOfAFile(t *testing.T) {
	path := file(t, strings.Join([]string{
		"shm_size = '64m'", "socket = '/s'", "sockt = '/x'", "run = '4m'", "[limits]", "kill = true", "rum = '5m'",
		"[runtimes.kata]", "type = 7", "path = '/k'", "[nonsense]", "[images]", "pinned = 'a'", "[[nri]]", "",
	}, "\n"))
	l := read(t, "--config", path)
	got := strings.Split(errors.Join(l.Strict()).Error(), "\n")
	for i, want := range []string{
		`:3: unknown key "sockt": did you mean "socket"?`,
		`:4: unknown key "run": did you mean "limits.run"?`,
		`:7: unknown key "limits.rum": did you mean "limits.run"?`,
		`:11: unknown key "nonsense": 'minicri config default'`,
		`:1: shm_size: "64m" is no number, `,
		`:6: limits.kill: true is no duration`,
		`:9: runtimes.kata.type: 7 is no text`,
		`:13: images.pinned: "a" is no list of texts`,
		`:14: nri: a list is no table`,
	} {
		harness.Need(t, i < len(got), "%d lines: %s", len(got), got)
		harness.Want(t, strings.HasPrefix(got[i], path+want), "line %d is %q; want %q", i, got[i], path+want)
	}
	harness.Same(t, "the socket", l.Socket, "/s")
}

func read(t *testing.T, arguments ...string) *Loaded {
	flags := pflag.NewFlagSet("minicri", pflag.ContinueOnError)
	AddFlags(flags)
	harness.Check(t, flags.Parse(arguments))
	return Load(flags)
}

// load is what a start does.
func load(arguments []string) (*Config, error) {
	flags := pflag.NewFlagSet("minicri", pflag.ContinueOnError)
	AddFlags(flags)
	if err := flags.Parse(arguments); err != nil {
		return nil, err
	}
	l := Load(flags)
	return l.Config, errors.Join(l.Broken...)
}

func file(t *testing.T, text string) string {
	path := filepath.Join(t.TempDir(), "config.toml")
	put(t, path, text)
	return path
}

func put(t *testing.T, path, text string) { harness.Check(t, os.WriteFile(path, []byte(text), 0o600)) }
