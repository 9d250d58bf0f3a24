package containerd

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/test/harness"
)

// What is written loads, and has the values.
func TestConvert(t *testing.T) {
	for name, test := range map[string]struct {
		from  string
		check func(*config.Config) bool
		notes []string
	}{
		"version 3": {`version = 3
[plugins.'io.containerd.cri.v1.images']
max_concurrent_downloads = 7
discard_unpacked_layers = false
[plugins.'io.containerd.cri.v1.images'.registry]
config_path = '/etc/containerd/certs.d:/etc/docker/certs.d'
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = 'registry.k8s.io/pause:3.10'
[plugins.'io.containerd.cri.v1.runtime']
device_ownership_from_security_context = true
selinux_category_range = 512
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = 'io.containerd.runc.v2'
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
SystemdCgroup = true
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.nvidia]
runtime_type = 'io.containerd.runc.v2'
privileged_without_host_devices = true
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.nvidia.options]
BinaryName = '/usr/bin/nvidia-container-runtime'
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.kata]
runtime_type = 'io.containerd.kata.v2'
[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dir = ''
bin_dirs = ['/opt/cni/bin']
[plugins.'io.containerd.nri.v1.nri']
disable = false
`, func(c *config.Config) bool {
			return c.Images.MaxDownloads == 7 && c.Images.KeepLayers && len(c.Images.CertsDirs) == 2 && c.DeviceOwnership && c.CgroupDriver == "systemd" && c.NRI.Enabled &&
				c.Runtimes["runc"].Type == config.Builtin && c.Runtimes["nvidia"].Path == "/usr/bin/nvidia-container-runtime" && c.Runtimes["nvidia"].PrivilegedWithoutHostDevices
		}, []string{"selinux_category_range = 512", "runtime handler kata"}},
		"version 2": {`version = 2
[plugins.'io.containerd.grpc.v1.cri']
sandbox_image = 'registry.k8s.io/pause:3.8'
stream_idle_timeout = '1h'
[plugins.'io.containerd.grpc.v1.cri'.containerd]
discard_unpacked_layers = true
[plugins.'io.containerd.grpc.v1.cri'.cni]
bin_dir = '/usr/libexec/cni'
[plugins.'io.containerd.grpc.v1.cri'.registry.mirrors.'docker.io']
endpoint = ['https://mirror.example']
[plugins.'io.containerd.grpc.v1.cri'.registry.mirrors.'m.example']
endpoint = ['https://user:hunter2@m.example']
[plugins.'io.containerd.grpc.v1.cri'.registry.configs.'registry.example'.auth]
password = 'hunter2'
[plugins.'io.containerd.grpc.v1.cri'.registry.auths.'https://registry.example']
auth = 'hunter2'
[plugins.'io.containerd.grpc.v1.cri'.registry.headers]
X-Meta = ['hunter2']
`, func(c *config.Config) bool {
			return c.CNIBin == "/usr/libexec/cni" && !c.Images.KeepLayers && time.Duration(c.Streaming.Idle) == time.Hour
		}, []string{"mirror.example", "images.docker_config"}},
		"version 4": {`version = 4
[plugins.'io.containerd.cri.v1.runtime']
enable_criu = true
[plugins.'io.containerd.server.v1.grpc']
address = '/run/k3s/containerd.sock'
[plugins.'io.containerd.server.v1.metrics']
address = '127.0.0.1:1338'
[plugins.'io.containerd.image-verifier.v1.bindir']
bin_dir = '/opt/verifiers'
per_verifier_timeout = '1m'
max_verifiers = 3
[plugins.'io.containerd.nri.v1.nri'.default_validator]
required_plugins = ['policy']
tolerate_missing_plugins_annotation = 'a.b/c'
reject_sysctl_adjustment = true
`, func(c *config.Config) bool {
			return c.Metrics == "127.0.0.1:1338" && c.Images.VerifierDir == "/opt/verifiers" && time.Duration(c.Images.VerifierTimeout) == time.Minute && c.NRI.Tolerate == "a.b/c"
		}, []string{"grpc.address = /run/k3s/containerd.sock", "nri.required_plugins", "nri.reject", "max_verifiers = 3"}},
		"containerd's verifiers":  {"version = 4\n[plugins.'io.containerd.image-verifier.v1.bindir']\nbin_dir = '/opt/containerd/image-verifier/bin'\n", func(c *config.Config) bool { return c.Images.VerifierDir == "" }, []string{"by the key 'images.verifier_dir'"}},
		"the handler was skipped": {criV2 + "[plugins.'io.containerd.grpc.v1.cri'.containerd]\ndefault_runtime_name = 'kata'\n" + runtimeV2("kata", "io.containerd.kata.v2", ""), noDefault, []string{"runtime handler kata", "default_runtime_name = kata"}},
		"its program is relative": {criV2 + runtimeV2("runc", "io.containerd.runc.v2", "BinaryName = 'crun'"), noDefault, []string{"runtime handler runc", "default_runtime_name = runc"}},
		"runc is crun":            {criV2 + runtimeV2("runc", "io.containerd.runc.v2", "BinaryName = '/usr/bin/crun'"), runcIsDefault, nil},
		"runc is runc":            {criV2 + runtimeV2("runc", "io.containerd.runc.v2", "BinaryName = 'runc'"), noDefault, nil},
		"runc has a base spec":    {criV2 + "[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.runc]\nruntime_type = 'io.containerd.runc.v2'\nbase_runtime_spec = '/etc/base.json'\n", runcIsDefault, nil},
		"runc has annotations":    {criV2 + "[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.runc]\nruntime_type = 'io.containerd.runc.v2'\npod_annotations = ['a.b/*']\n", runcIsDefault, nil},
		"a base spec is relative": {criV2 + "[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.runc]\nruntime_type = 'io.containerd.runc.v2'\nbase_runtime_spec = 'base.json'\n", noDefault, []string{"runtimes.runc = ", "runtimes.runc.base_spec"}},
		"there is no limit":       {criV2 + "image_pull_progress_timeout = '0s'\n", anything, []string{"images.progress_timeout = 0s"}},
		"a limit is no duration":  {criV2 + "image_pull_progress_timeout = 'soon'\n", anything, []string{"images.progress_timeout = soon"}},
		"values of other kinds":   {criV2 + "systemd_cgroup = []\n[plugins.'io.containerd.grpc.v1.cri'.cni]\nbin_dirs = '/opt/x'\n[debug]\nlevel = ['x']\n", func(c *config.Config) bool { return c.CNIBin == "/opt/x" }, nil},
		"half a certificate":      {criV2 + "[plugins.'io.containerd.grpc.v1.cri'.x509_key_pair_streaming]\ntls_cert_file = '/c'\n", anything, []string{"streaming.tls_cert = /c"}},
		"the collector is a URL": {"version = 2\n[plugins.'io.containerd.tracing.processor.v1.otlp']\nendpoint = 'http://h:4318'\nprotocol = 'http/protobuf'\n", func(c *config.Config) bool {
			return c.Tracing.Endpoint == "h:4318" && c.Tracing.Protocol == "http" && c.Tracing.Insecure
		}, nil},
		"the collector has no port":  {"version = 2\n[plugins.'io.containerd.tracing.processor.v1.otlp']\nendpoint = 'h'\nprotocol = 'grpc'\n", func(c *config.Config) bool { return c.Tracing.Endpoint == "" && c.Tracing.Protocol == "grpc" }, []string{"tracing.endpoint = h"}},
		"the collector speaks other": {"version = 2\n[plugins.'io.containerd.tracing.processor.v1.otlp']\nendpoint = 'h:1'\nprotocol = 'smoke'\n", anything, []string{"tracing.protocol = smoke"}},
		"gVisor": {criV2 + runtimeV2("runsc", "io.containerd.runsc.v1", "TypeUrl = 'io.containerd.runsc.v1.options'"), func(c *config.Config) bool {
			r := c.Runtimes["runsc"]
			return r.SandboxPerContainer && slices.Equal(r.Args, []string{"--network=host"})
		}, []string{"options.TypeUrl"}},
		"gVisor by runc's shim": {criV2 + runtimeV2("gvisor", "io.containerd.runc.v2", "BinaryName = '/opt/bin/runsc'"), func(c *config.Config) bool {
			return c.Runtimes["gvisor"].Path == "/opt/bin/runsc" && slices.Equal(c.Runtimes["gvisor"].Args, []string{"--network=host"})
		}, nil},
		"a collector with TLS": {"version = 2\n[plugins.'io.containerd.tracing.processor.v1.otlp']\nendpoint = 'https://h:4317'\nprotocol = 'grpc'\n", func(c *config.Config) bool {
			return !c.Tracing.Insecure && c.Tracing.Endpoint == "h:4317" && c.Tracing.PerMillion == 1_000_000
		}, nil},
		"a collector by its default": {"version = 2\n[plugins.'io.containerd.tracing.processor.v1.otlp']\nendpoint = 'h:4317'\nprotocol = 'grpc'\n[plugins.'io.containerd.internal.v1.tracing']\nsampling_ratio = 0.25\n", func(c *config.Config) bool {
			return !c.Tracing.Insecure && c.Tracing.PerMillion == 250_000
		}, nil},
		"cgroups of one handler": {criV2 + "[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.sys]\nruntime_type = 'io.containerd.runc.v2'\ncgroup_writable = true\n", func(c *config.Config) bool {
			return !c.CgroupWritable && c.Runtimes["sys"].Type == config.Builtin
		}, []string{"runtime handler sys, cgroup_writable = true"}},
		"directories": {"version = 3\nroot = '/mnt/containerd'\nstate = '/mnt/run'\nimports = ['/etc/containerd/conf.d/*.toml']\noom_score = -500\n", anything, []string{
			"refused:\n#  root = /mnt/containerd", "state = /mnt/run", "imports = [/etc/containerd/conf.d/*.toml]", "oom_score = -500",
		}},
		"transfer service":       {"version = 3\n[plugins.'io.containerd.transfer.v1.local']\nmax_concurrent_downloads = 20\n", func(c *config.Config) bool { return c.Images.MaxDownloads == 20 }, nil},
		"runc without its type":  {criV2 + "[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.runc.options]\nSystemdCgroup = true\n", func(c *config.Config) bool { return c.CgroupDriver == "systemd" }, nil},
		"the form of the log":    {"version = 3\n[debug]\nformat = 'json'\n", func(c *config.Config) bool { return c.LogFormat == "json" }, nil},
		"switched off":           {criV2 + "enable_cdi = false\nenable_unprivileged_ports = false\n", anything, []string{"enable_cdi = false: minicri always", "enable_unprivileged_ports = false: minicri always"}},
		"another snapshotter":    {"version = 3\n[proxy_plugins.stargz]\ntype = 'snapshot'\naddress = '/run/s'\n[plugins.'io.containerd.gc.v1.scheduler']\npause_threshold = 0.02\n", anything, []string{"# Not used by minicri: plugins.io.containerd.gc.v1.scheduler, proxy_plugins.stargz\n"}},
		"a handler without path": {criV2 + runtimeV2("kata", "io.containerd.kata.v2", ""), anything, []string{"runtime handler kata (io.containerd.kata.v2): "}},
	} {
		text, err := Convert([]byte(test.from))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		c := load(t, text)
		harness.Want(t, test.check(c), "%s: it became\n%s", name, text)
		for _, note := range test.notes {
			harness.Want(t, strings.Contains(string(text), note), "%s: nothing says %q:\n%s", name, note, text)
		}
		harness.Want(t, !regexp.MustCompile("hunter2|cni_bin_dir = :|enable_criu").Match(text), "%s: a password, or a key without a value, is in it:\n%s", name, text)
	}
}

const criV2 = "version = 2\n[plugins.'io.containerd.grpc.v1.cri']\n"

func runtimeV2(name, kind, options string) string {
	const table = "[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes."
	return table + name + "]\nruntime_type = '" + kind + "'\n" + table + name + ".options]\n" + options + "\n"
}

func anything(*config.Config) bool        { return true }
func noDefault(c *config.Config) bool     { return c.DefaultRuntime == "" }
func runcIsDefault(c *config.Config) bool { return c.DefaultRuntime == "runc" }

// What Debian's containerd prints as its default says nothing.
func TestDefaultsSayNothing(t *testing.T) {
	const program = "../../bin/debian/usr/bin/containerd"
	if _, err := os.Stat(program); err != nil {
		t.Skip("containerd is not there: make bench-deps unpacks it")
	}
	data, err := exec.Command(program, "config", "default").Output()
	harness.Check(t, err)
	text, err := Convert(data)
	harness.Check(t, err)
	var notes []string
	for line := range strings.Lines(string(text)) {
		if note, is := strings.CutPrefix(line, "#  "); is {
			notes = append(notes, strings.TrimSpace(note))
		}
	}
	harness.Same(t, "notes", notes, []string{ // this old version has them off
		"cri.enable_unprivileged_icmp = false: minicri always does", "cri.enable_unprivileged_ports = false: minicri always does",
	})
}

func TestRefusesOtherVersions(t *testing.T) {
	for _, text := range []string{"", "version = 1\n", "version = 5\n", "x", "[crio.runtime]\nlog_level = 'info'\n"} {
		got, err := Convert([]byte(text))
		harness.Want(t, err != nil, "%q became %q", text, got)
	}
}

// Each rule leads to a key that there is, or gives a reason, or neither.
func TestRulesNameKeys(t *testing.T) {
	keys := map[string]bool{}
	for _, key := range config.Keys() {
		keys[key.Name] = true
	}
	for name, r := range rules() {
		harness.Want(t, r.to == "" || keys[r.to] && r.why == "", "%s: %q is no key, or there is a reason too: %q", name, r.to, r.why)
	}
}

func load(t *testing.T, text []byte) *config.Config {
	file := filepath.Join(t.TempDir(), "config.toml")
	harness.Check(t, os.WriteFile(file, text, 0o600))
	l, err := config.LoadFile(file)
	if err == nil {
		err = l.Strict()
	}
	harness.Need(t, err == nil, "%v\n%s", err, text)
	return l.Config
}

// docs/from-containerd.md says of each key what the rule does.
func TestPageHasTheRules(t *testing.T) {
	page := harness.Read(t, "../../docs/from-containerd.md")
	rows := 0
	for _, row := range regexp.MustCompile("(?m)^\\| (`.*`) \\| (`([a-z_.]+)`|none.*) \\|$").FindAllStringSubmatch(string(page), -1) {
		for _, key := range regexp.MustCompile("`([a-z_.0-9]+)`").FindAllStringSubmatch(row[1], -1) {
			r, known := rules()["cri."+key[1]]
			harness.Want(t, known && r.to == row[3], "the page says %s of %s, the rule %q (%v)", row[2], key[1], r.to, known)
			rows++
		}
	}
	harness.Want(t, rows >= 15, "%d keys were found on the page", rows)
}
