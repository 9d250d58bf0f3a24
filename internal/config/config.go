// Package config reads what the daemon is to do: defaults, then a TOML file,
// then the drop-ins beside it, then the flags; what comes later counts. It owns
// nothing and keeps no state.
package config

import (
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"time"
)

// Config is the whole configuration. The names of its keys are those of the
// flags, with underscores.
type Config struct {
	Socket   string   `toml:"socket" comment:"where the CRI is served, mode 0600"`
	Root     string   `toml:"root" comment:"what has to survive a reboot"`
	State    string   `toml:"state" comment:"what ends with the machine"`
	NetnsDir string   `toml:"netns_dir" comment:"where network namespaces are pinned"`
	CNIConf  string   `toml:"cni_conf_dir" comment:"network configurations; the first good one by name counts"`
	CNIBin   string   `toml:"cni_bin_dir" comment:"network plugins; several directories with ':' between them"`
	Shim     string   `toml:"shim" comment:"'' is minicri-shim beside the daemon"`
	LogLevel string   `toml:"log_level" comment:"debug, info, warn or error"`
	Metrics  string   `toml:"metrics_address" comment:"where Prometheus finds /metrics, such as 127.0.0.1:9440; '' is nowhere"`
	Handlers []string `toml:"runtime_handlers" comment:"names that RuntimeClasses may use besides the default"`

	CgroupDriver string `toml:"cgroup_driver" comment:"cgroupfs or systemd; '' is systemd where it runs the machine with cgroup v2"`
	CgroupParent string `toml:"cgroup_parent" comment:"for pods that name none; '' is /minicri, or system.slice for systemd"`

	PidsLimit int64 `toml:"pids_limit" comment:"the most processes of a container; 0 is no limit"`

	DefaultNetwork DefaultNetwork `toml:"default_network" comment:"a bridge network, used while cni_conf_dir has none"`
	Images         Images         `toml:"images" comment:"pulling and keeping images"`
	Streaming      Streaming      `toml:"streaming" comment:"exec, attach and port-forward"`
	Limits         Limits         `toml:"limits" comment:"how long things may take"`
}

// DefaultNetwork is the embedded network.
type DefaultNetwork struct {
	Enabled bool   `toml:"enabled"`
	Name    string `toml:"name"`
	Bridge  string `toml:"bridge"`
	Subnet  string `toml:"subnet" comment:"one, or an IPv4 and an IPv6 one with ',' between them; '' is the pod CIDR that the kubelet sends"`
	DataDir string `toml:"data_dir" comment:"where addresses are kept; '' is the plugin's own default"`
}

// Images say how images are pulled and kept.
type Images struct {
	CertsDirs       []string `toml:"certs_dirs" comment:"searched in order for HOST/hosts.toml, at each pull"`
	DockerConfig    string   `toml:"docker_config" comment:"a docker config.json with credentials, for pulls that bring none"`
	VerifierDir     string   `toml:"verifier_dir" comment:"programs that all have to accept an image before it is fetched"`
	Pinned          []string `toml:"pinned" comment:"images that the kubelet must not collect"`
	Sync            bool     `toml:"sync" comment:"whether a pulled image survives a power cut"`
	ProgressTimeout Duration `toml:"progress_timeout" comment:"ends a pull whose registry sends no byte for so long"`
	MaxDownloads    int      `toml:"max_downloads" comment:"blobs that one pull fetches at once"`
	MaxUnpacks      int      `toml:"max_unpacks" comment:"layers that one pull unpacks at once"`
}

// Streaming says where exec, attach and port-forward are served.
type Streaming struct {
	Address    string   `toml:"address" comment:"TCP; the kubelet comes here, so loopback does. Port 0 is any"`
	TLSCert    string   `toml:"tls_cert" comment:"PEM file, with tls_key; '' is no TLS"`
	TLSKey     string   `toml:"tls_key"`
	SelfSigned bool     `toml:"tls_self_signed" comment:"TLS with a certificate that the daemon makes for itself"`
	Idle       Duration `toml:"idle_timeout" comment:"ends a session that is silent for so long"`
	Creation   Duration `toml:"creation_timeout" comment:"how long a client may take to open its streams"`
	MaxOpen    int      `toml:"max_open" comment:"the most sessions at once"`
}

// Limits are how long things may take, and how often they are tried.
type Limits struct {
	Run         Duration `toml:"run" comment:"RunPodSandbox, all steps together"`
	Destroy     Duration `toml:"destroy" comment:"taking a sandbox back"`
	Create      Duration `toml:"create" comment:"CreateContainer or StartContainer, all steps together"`
	Kill        Duration `toml:"kill" comment:"a process that got SIGKILL"`
	CNIAdd      Duration `toml:"cni_add" comment:"the plugins of one network, per verb; then their processes are killed"`
	CNIDel      Duration `toml:"cni_del"`
	CNICheck    Duration `toml:"cni_check"`
	CNIStatus   Duration `toml:"cni_status"`
	CNIGC       Duration `toml:"cni_gc"`
	DetachTries int      `toml:"detach_tries" comment:"a DEL that failed so often, or for so long, blocks a pod's deletion no longer"`
	DetachTime  Duration `toml:"detach_time"`
	RetryFirst  Duration `toml:"retry_first" comment:"pause before a failed DEL is repeated in the background; it doubles"`
	RetryMost   Duration `toml:"retry_most"`
	Reload      Duration `toml:"reload" comment:"how often cni_conf_dir is looked at"`
	Status      Duration `toml:"status_period" comment:"how often the plugins are asked for their STATUS"`
	GC          Duration `toml:"gc_period" comment:"how often CNI GC runs; '0s' turns it off"`
	Check       Duration `toml:"check_period" comment:"how often CNI CHECK runs for all pods; '0s' is only at SIGUSR1"`
	Shutdown    Duration `toml:"shutdown" comment:"how long calls may go on after SIGTERM"`
}

// Duration is a time.Duration that is written as text: "1m30s".
type Duration time.Duration

// UnmarshalText reads a duration as time.ParseDuration does.
func (d *Duration) UnmarshalText(text []byte) error {
	parsed, err := time.ParseDuration(string(text))
	*d = Duration(parsed)
	return err
}

// MarshalText writes it so.
func (d Duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

// Default is the configuration of a machine where nothing is configured.
func Default() *Config {
	second := func(n int) Duration { return Duration(time.Duration(n) * time.Second) }
	return &Config{
		Socket:   "/run/minicri/minicri.sock",
		Root:     "/var/lib/minicri",
		State:    "/run/minicri",
		NetnsDir: "/run/netns",
		CNIConf:  "/etc/cni/net.d",
		CNIBin:   "/opt/cni/bin",
		LogLevel: "info",
		Handlers: []string{"runc"},
		DefaultNetwork: DefaultNetwork{
			Name:   "minicri",
			Bridge: "minicri0",
		},
		Images: Images{
			CertsDirs: []string{"/etc/minicri/certs.d", "/etc/containerd/certs.d"},
			Pinned:    []string{}, Sync: true, ProgressTimeout: second(60), MaxDownloads: 3, MaxUnpacks: 2,
		},
		Streaming: Streaming{Address: "127.0.0.1:0", Idle: second(4 * 3600), Creation: second(30), MaxOpen: 1000},
		Limits: Limits{
			Run: second(230), Destroy: second(100), Create: second(100), Kill: second(10),
			CNIAdd: second(180), CNIDel: second(60), CNICheck: second(20), CNIStatus: second(5), CNIGC: second(60),
			DetachTries: 5, DetachTime: second(300),
			RetryFirst: second(1), RetryMost: second(300),
			Reload: second(1), Status: second(5), GC: second(600), Shutdown: second(10),
		},
	}
}

// BinDirs are the directories of the network plugins.
func (c *Config) BinDirs() []string { return filepath.SplitList(c.CNIBin) }

// Check tells what cannot be used, each with its key.
func (c *Config) Check() error {
	for key, path := range map[string]string{
		"socket": c.Socket, "root": c.Root, "state": c.State, "netns_dir": c.NetnsDir, "cni_conf_dir": c.CNIConf,
	} {
		if !filepath.IsAbs(path) {
			return fmt.Errorf("%s: %q is not an absolute path", key, path)
		}
	}
	// sockaddr_un (unix(7)) holds 107 characters and a NUL.
	if len(c.Socket) > 107 {
		return fmt.Errorf("socket: %q is longer than the 107 characters that a unix socket can have", c.Socket)
	}
	switch c.CgroupDriver {
	case "", "cgroupfs", "systemd":
	default:
		return fmt.Errorf("cgroup_driver: %q is neither cgroupfs nor systemd", c.CgroupDriver)
	}
	if c.CgroupDriver == "systemd" && c.CgroupParent != "" && !strings.HasSuffix(c.CgroupParent, ".slice") {
		return fmt.Errorf("cgroup_parent: %q is not a slice, but cgroup_driver is systemd", c.CgroupParent)
	}
	if _, err := c.Level(); err != nil {
		return fmt.Errorf("log_level: %w", err)
	}
	if err := c.Streaming.check(); err != nil {
		return err
	}
	return c.Limits.check()
}

func (s *Streaming) check() error {
	if _, _, err := net.SplitHostPort(s.Address); err != nil {
		return fmt.Errorf("streaming.address: %w: write it as in '127.0.0.1:0'", err)
	}
	if (s.TLSCert == "") != (s.TLSKey == "") {
		return errors.New("streaming.tls_cert, streaming.tls_key: one is of no use without the other")
	}
	if s.SelfSigned && s.TLSCert != "" {
		return errors.New("streaming.tls_self_signed: there is a certificate already, that of streaming.tls_cert")
	}
	for key, limit := range map[string]Duration{"idle_timeout": s.Idle, "creation_timeout": s.Creation} {
		if limit < shortest {
			return fmt.Errorf("streaming.%s: %v is too short: write a duration with its unit, as in '5s'", key, time.Duration(limit))
		}
	}
	if s.MaxOpen < 1 {
		return fmt.Errorf("streaming.max_open: %d is less than 1", s.MaxOpen)
	}
	return nil
}

// shortest is less than any limit can be meant: a number without a unit, which
// TOML lets through as nanoseconds, is an error.
const shortest = Duration(time.Millisecond)

func (l *Limits) check() error {
	for key, limit := range map[string]Duration{
		"run": l.Run, "destroy": l.Destroy, "create": l.Create, "kill": l.Kill, "cni_add": l.CNIAdd, "cni_del": l.CNIDel, "cni_check": l.CNICheck,
		"cni_status": l.CNIStatus, "cni_gc": l.CNIGC, "retry_first": l.RetryFirst, "retry_most": l.RetryMost,
		"reload": l.Reload, "status_period": l.Status, "shutdown": l.Shutdown,
	} {
		if limit < shortest {
			return fmt.Errorf("limits.%s: %v is too short: write a duration with its unit, as in '5s'", key, time.Duration(limit))
		}
	}
	for key, limit := range map[string]Duration{"detach_time": l.DetachTime, "gc_period": l.GC} {
		if limit != 0 && limit < shortest {
			return fmt.Errorf("limits.%s: %v is too short: write '0s', or a duration with its unit, as in '5s'", key, time.Duration(limit))
		}
	}
	if l.DetachTries < 1 {
		return fmt.Errorf("limits.detach_tries: %d is less than 1", l.DetachTries)
	}
	return nil
}
