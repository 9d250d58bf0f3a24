// Package config is the daemon's configuration: defaults, a TOML file, its drop-ins by name, then flags; later values
// win. The fields' tags are the only description of keys: the printed defaults, docs/configuration.md, the manual
// page and the checks come from them. Besides toml and comment there are: need, what a text is (one of several words,
// or a kind that checkText knows; a question mark allows an empty one), zero, what an allowed zero means, least and
// most of a number, and reload, on what takes effect without a restart. The package owns nothing and keeps no state.
package config

import (
	"cmp"
	"fmt"
	"maps"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Config is the whole configuration. A flag has its key's name, with hyphens for underscores.
type Config struct {
	Socket      string `toml:"socket" need:"path" comment:"unix socket of the CRI, mode 0600"`
	Containerd  string `toml:"containerd_socket" need:"path?" comment:"second unix socket, where the cAdvisor of the kubelet expects containerd, mode 0600; minicri does not take it from another runtime; '' means none: then /metrics/cadvisor of the kubelet has no series of containers"`
	Root        string `toml:"root" need:"path" comment:"directory for data that survives a reboot"`
	State       string `toml:"state" need:"path" comment:"directory for data that a reboot removes; at most 72 characters, because it contains sockets"`
	NetnsDir    string `toml:"netns_dir" need:"path" comment:"directory where network namespaces are pinned, by the path that plugins and their agents get"`
	CNIConf     string `toml:"cni_conf_dir" need:"path" comment:"directory of network configurations; the first valid one by name is used"`
	CNIBin      string `toml:"cni_bin_dir" need:"paths" comment:"directories of network plugins, separated by ':'"`
	Shim        string `toml:"shim" need:"path?" comment:"path of minicri-shim; '' means the directory of the daemon"`
	LogLevel    string `toml:"log_level" reload:"yes" comment:"debug, info, warn or error"`
	LogFormat   string `toml:"log_format" need:"text or json" comment:"text or json"`
	Metrics     string `toml:"metrics_address" need:"endpoint?" comment:"TCP address of Prometheus metrics (/metrics), such as 127.0.0.1:9440; '' means no metrics"`
	MetricsCert string `toml:"metrics_tls_cert" need:"path?" comment:"PEM file with the certificate for metrics_address; requires metrics_tls_key; '' means no TLS"`
	MetricsKey  string `toml:"metrics_tls_key" need:"path?" comment:"PEM file with the key of the certificate"`

	CgroupDriver string `toml:"cgroup_driver" need:"cgroupfs or systemd?" comment:"cgroupfs or systemd; '' means systemd if it manages a machine with cgroup v2, otherwise cgroupfs"`
	CgroupParent string `toml:"cgroup_parent" comment:"cgroup of pods without a cgroup parent; '' means /minicri, or system.slice with the driver systemd"`

	DefaultUlimits       []string `toml:"default_ulimits" need:"ulimit" comment:"limits of the processes in containers, each name=soft:hard as in 'nofile=1024:524288', -1 means no limit; without an entry nofile is 1024:524288, nproc and core have no limit, and the others have the defaults of the kernel"`
	DefaultEnv           []string `toml:"default_env" need:"pair" comment:"environment variables of all containers, each NAME=VALUE; image and container may override them"`
	DefaultSysctls       []string `toml:"default_sysctls" need:"sysctl" comment:"kernel parameters of all pods, each name=value; a pod may override them; pods in the namespace of the node do not get them"`
	DefaultCapabilities  []string `toml:"default_capabilities" need:"capability" comment:"capabilities of an unprivileged container before it adds or drops any; [] means the defaults of containerd"`
	DefaultSeccomp       string   `toml:"default_seccomp" need:"profile?" comment:"seccomp profile of containers that request none: runtime/default, unconfined, or localhost/ with the path of a file; '' means unconfined"`
	DefaultAppArmor      string   `toml:"default_apparmor" need:"profile?" comment:"AppArmor profile of containers that request none: runtime/default, unconfined, or localhost/ with the name of a loaded profile; '' means runtime/default"`
	CDIDirs              []string `toml:"cdi_spec_dirs" need:"path" comment:"directories of CDI specifications; a later directory takes precedence"`
	ShmSize              int64    `toml:"shm_size" least:"4096" most:"1099511627776" comment:"size of /dev/shm of a pod in bytes"`
	BaseSpec             string   `toml:"base_spec" need:"path?" comment:"file with a runtime-spec (config.json), the base of the spec of each container; read at the start of the daemon; '' means an empty spec"`
	PodAnnotations       []string `toml:"pod_annotations" need:"pattern" comment:"annotations of pods to copy to the runtime-spec of containers, for hooks; '*' matches everything except '/'"`
	ContainerAnnotations []string `toml:"container_annotations" need:"pattern" comment:"annotations of containers to copy to the runtime-spec, as for pod_annotations"`
	DeviceOwnership      bool     `toml:"device_ownership_from_security_context" comment:"true: devices in a container belong to its runAsUser and runAsGroup, instead of their owner on the node"`
	CgroupWritable       bool     `toml:"cgroup_writable" comment:"true: containers may write to their own cgroups; requires cgroup v2 mounted with nsdelegate"`
	PidsLimit            int64    `toml:"pids_limit" least:"0" most:"4194304" zero:"no limit" comment:"maximum number of processes of a container"`
	DefaultRuntime       string   `toml:"default_runtime" reload:"yes" comment:"runtime handler of pods without one; existing pods keep theirs; '' means the type builtin"`

	DefaultNetwork DefaultNetwork     `toml:"default_network" reload:"yes" comment:"a bridge network, used while cni_conf_dir has no configuration"`
	Images         Images             `toml:"images" reload:"yes" comment:"pulling and keeping images"`
	Streaming      Streaming          `toml:"streaming" comment:"exec, attach and port-forward"`
	NRI            NRI                `toml:"nri" reload:"yes" comment:"plugins of the Node Resource Interface adjust pods and containers"`
	Tracing        Tracing            `toml:"tracing" comment:"OpenTelemetry spans for calls, steps, plugins and layers"`
	Limits         Limits             `toml:"limits" reload:"yes" comment:"time limits of operations, and numbers of tries"`
	Runtimes       map[string]Runtime `toml:"runtimes" reload:"yes" comment:"runtime handlers for RuntimeClasses; pods without a RuntimeClass use default_runtime"`
}

// The types of runtime handlers.
const (
	Builtin = "builtin" // libcontainer in minicri-shim
	OCI     = "oci"     // a program with runc's command line
)

// Runtime is one runtime handler.
type Runtime struct {
	Type string   `toml:"type" comment:"builtin: libcontainer in minicri-shim runs the containers; oci: a program with the command line of runc, such as runc or crun"`
	Path string   `toml:"path" need:"path?" comment:"the program, for the type oci"`
	Args []string `toml:"args" comment:"global flags of the program, before its verb"`
	// The rest is for this handler alone.
	PrivilegedWithoutHostDevices bool     `toml:"privileged_without_host_devices" comment:"true: privileged containers get only the devices that they request, and may use every device"`
	PodAnnotations               []string `toml:"pod_annotations" need:"pattern" comment:"more annotations of pods, as for the global key pod_annotations"`
	ContainerAnnotations         []string `toml:"container_annotations" need:"pattern" comment:"annotations of containers to copy to the runtime-spec, as for pod_annotations"`
	BaseSpec                     string   `toml:"base_spec" need:"path?" comment:"overrides the global base_spec; '' means the global one"`
	CNIConf                      string   `toml:"cni_conf_dir" need:"path?" comment:"directory of network configurations for pods of this handler; '' means the global one. It never falls back to default_network"`
	SandboxPerContainer          bool     `toml:"sandbox_per_container" comment:"for programs that create a sandbox, such as runsc: each container gets its own sandbox, and its spec does not have the annotation container-type"`
}

// Command is the path and flags of a runtime; none for the type builtin.
func (r Runtime) Command() []string {
	if r.Type == Builtin {
		return nil
	}
	return append([]string{r.Path}, r.Args...)
}

// DefaultNetwork is the embedded network.
type DefaultNetwork struct {
	Enabled    bool   `toml:"enabled" comment:"true: use it while cni_conf_dir has no configuration"`
	Name       string `toml:"name" need:"network" comment:"name of the network, for plugins and their files"`
	Bridge     string `toml:"bridge" need:"link" comment:"name of the bridge, at most 15 characters"`
	Subnet     string `toml:"subnet" comment:"a subnet, or an IPv4 and an IPv6 subnet separated by ','; '' means the pod CIDR from the kubelet"`
	Masquerade bool   `toml:"masquerade" comment:"true: traffic from pods to other networks gets the address of the node; use false if every other node has a route to the pods"`
	DataDir    string `toml:"data_dir" need:"path?" comment:"directory of the recorded addresses; '' means the default of the plugin"`
}

// Images says how images are pulled and kept.
type Images struct {
	CertsDirs       []string `toml:"certs_dirs" need:"path" comment:"directories with HOST/hosts.toml, searched in order at each pull"`
	DockerConfig    string   `toml:"docker_config" need:"path?" comment:"a docker config.json with credentials, or with names of credential helpers in the PATH of the daemon, for pulls without credentials"`
	VerifierDir     string   `toml:"verifier_dir" need:"path?" comment:"directory of programs; all have to accept an image before it is fetched"`
	Pinned          []string `toml:"pinned" need:"reference" comment:"references of images that the kubelet must not remove"`
	VerifierTimeout Duration `toml:"verifier_timeout" comment:"limit of one program in verifier_dir"`
	ProgressTimeout Duration `toml:"progress_timeout" comment:"a pull fails if its registry sends no data for this time"`
	MinRate         int      `toml:"min_rate" least:"0" most:"1073741824" comment:"a pull fails if its registry sends fewer bytes per second, averaged over progress_timeout; 0 means no minimum"`
	MaxDownloads    int      `toml:"max_downloads" least:"1" most:"256" comment:"number of parallel downloads of one pull"`
	KeepLayers      bool     `toml:"keep_layers" comment:"true: new images keep their compressed layers on disk besides the unpacked ones, and 'minicri image save' writes the bytes of the registry"`
}

// Streaming says where exec, attach and port-forward are served.
type Streaming struct {
	Address    string   `toml:"address" need:"endpoint" comment:"TCP address; the kubelet connects to it, so loopback is enough. Port 0 means any free port"`
	TLSCert    string   `toml:"tls_cert" need:"path?" comment:"PEM file with a certificate; requires tls_key; '' means no TLS"`
	TLSKey     string   `toml:"tls_key" need:"path?" comment:"PEM file with the key of the certificate"`
	SelfSigned bool     `toml:"tls_self_signed" comment:"true: TLS with a certificate that the daemon creates at its start"`
	Idle       Duration `toml:"idle_timeout" comment:"a session without data for this time ends"`
	Creation   Duration `toml:"creation_timeout" comment:"limit for a client of exec or attach to open its streams"`
	MaxOpen    int      `toml:"max_open" least:"1" most:"1000000" comment:"maximum number of concurrent sessions"`
}

// NRI says where the plugins of the Node Resource Interface come from.
type NRI struct {
	Enabled      bool     `toml:"enabled" comment:"true: NRI plugins adjust pods and containers"`
	Socket       string   `toml:"socket" need:"path?" comment:"unix socket for plugins; '' means none; while another runtime serves it, only the plugins of plugin_dir take part"`
	PluginDir    string   `toml:"plugin_dir" need:"path" comment:"directory of plugins that the daemon starts, each named INDEX-NAME with an index of two digits; optional"`
	ConfigDir    string   `toml:"config_dir" need:"path" comment:"directory of configurations of plugins, INDEX-NAME.conf or NAME.conf; optional"`
	Registration Duration `toml:"registration_timeout" comment:"limit for a connected plugin to register"`
	Request      Duration `toml:"request_timeout" comment:"limit for an answer of a plugin; then it is disconnected, unless it requested to stay, and pods continue without it"`
	Required     []string `toml:"required_plugins" need:"plugin" comment:"names of plugins, with or without index, that have to be connected when a pod or a container is created"`
	Tolerate     string   `toml:"tolerate_missing_annotation" comment:"annotation of pods; with the value 'true' a pod does not need required_plugins; '' means none"`
	Reject       []string `toml:"reject" need:"hooks or namespaces or sysctls or seccomp" comment:"adjustments that no plugin may make: hooks, namespaces, sysctls, seccomp"`
}

// Tracing says where spans are sent.
type Tracing struct {
	Endpoint   string `toml:"endpoint" need:"endpoint?" comment:"TCP address of an OTLP collector, such as 127.0.0.1:4317; '' means no tracing"`
	Protocol   string `toml:"protocol" need:"grpc or http" comment:"grpc or http"`
	Insecure   bool   `toml:"insecure" comment:"true: no TLS to the collector"`
	PerMillion int    `toml:"sampling_rate_per_million" least:"0" most:"1000000" comment:"traced calls per million, for calls without a decision of their caller; the decision of the kubelet counts"`
}

// Limits are time limits of operations, and numbers of tries.
type Limits struct {
	Run         Duration `toml:"run" comment:"RunPodSandbox, all steps together"`
	Destroy     Duration `toml:"destroy" comment:"teardown of a sandbox"`
	Create      Duration `toml:"create" comment:"CreateContainer or StartContainer, all steps together"`
	Kill        Duration `toml:"kill" comment:"time for a process to end after SIGKILL"`
	CNIAdd      Duration `toml:"cni_add" comment:"CNI ADD of one network, all its plugins; then their processes are killed"`
	CNIDel      Duration `toml:"cni_del" comment:"DEL of one plugin; then its processes are killed, and the other plugins get their DEL"`
	CNICheck    Duration `toml:"cni_check" comment:"as cni_add, for CHECK"`
	CNIStatus   Duration `toml:"cni_status" comment:"as cni_add, for STATUS"`
	CNIGC       Duration `toml:"cni_gc" comment:"as cni_add, for GC"`
	CNIAtOnce   int      `toml:"cni_at_once" least:"0" most:"1000000" comment:"number of networks whose plugins run at the same time for ADD or DEL, others wait; a run that takes longer than 2 s does not count any more. 0 means no limit"`
	DetachTries int      `toml:"detach_tries" least:"1" most:"1000000" comment:"StopPodSandbox fails this number of times because of a failing DEL, then it succeeds; DELs in the background do not count. detach_time may end that earlier"`
	DetachTime  Duration `toml:"detach_time" zero:"not at all" comment:"StopPodSandbox fails because of a failing DEL for this time after the first failure; detach_tries may end that earlier"`
	GiveUpTries int      `toml:"give_up_tries" least:"1" most:"1000000" comment:"an attachment without a successful ADD is abandoned after this number of failed DELs, if give_up_time is over, too; DELs that a change of the network brings forward do not count"`
	GiveUpTime  Duration `toml:"give_up_time" zero:"after give_up_tries" comment:"such an attachment is kept for at least this time after its first failed DEL"`
	RetryFirst  Duration `toml:"retry_first" comment:"delay before a failed DEL is repeated in the background; it doubles"`
	RetryMost   Duration `toml:"retry_most" comment:"the longest delay before a DEL is repeated"`
	Reload      Duration `toml:"reload" comment:"interval for reading cni_conf_dir"`
	Status      Duration `toml:"status_period" comment:"interval of CNI STATUS"`
	GC          Duration `toml:"gc_period" zero:"never" comment:"pause between the end of one CNI GC and the start of the next"`
	Check       Duration `toml:"check_period" zero:"only at SIGUSR1" comment:"interval of CNI CHECK for all pods"`
	Shutdown    Duration `toml:"shutdown" comment:"time for running calls after SIGTERM"`
}

// Duration is a time.Duration that is written as text: "1m30s".
type Duration time.Duration

// UnmarshalText implements encoding.TextUnmarshaler.
func (d *Duration) UnmarshalText(text []byte) error {
	parsed, err := time.ParseDuration(string(text))
	*d = Duration(parsed)
	return err
}

// MarshalText implements encoding.TextMarshaler.
func (d Duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

// BinDirs are the directories of the network plugins.
func (c *Config) BinDirs() []string { return filepath.SplitList(c.CNIBin) }

// CNIConfDirs are the cni_conf_dir of handlers, sorted, each once.
func (c *Config) CNIConfDirs() (paths []string) {
	for _, name := range c.Handlers() {
		if path := c.Runtimes[name].CNIConf; path != "" {
			paths = append(paths, path)
		}
	}
	slices.Sort(paths)
	return slices.Compact(paths)
}

// Handlers are the names of the runtime handlers besides "", sorted.
func (c *Config) Handlers() []string { return slices.Sorted(maps.Keys(c.Runtimes)) }

// Default is the configuration of a machine where nothing is configured.
func Default() *Config {
	second := func(n int) Duration { return Duration(time.Duration(n) * time.Second) }
	return &Config{
		Socket: "/run/minicri/minicri.sock", Containerd: "/run/containerd/containerd.sock",
		Root: "/var/lib/minicri", State: "/run/minicri", NetnsDir: "/var/run/netns",
		CNIConf:  "/etc/cni/net.d",
		CNIBin:   "/opt/cni/bin:/usr/lib/cni:/usr/local/lib/minicri/cni:/usr/lib/minicri/cni",
		LogLevel: "info", LogFormat: "text",
		DefaultUlimits: []string{}, DefaultEnv: []string{}, DefaultSysctls: []string{}, PodAnnotations: []string{}, ContainerAnnotations: []string{},
		DefaultCapabilities: []string{}, CDIDirs: []string{"/etc/cdi", "/var/run/cdi"},
		ShmSize:        64 << 20,
		Runtimes:       map[string]Runtime{"runc": {Type: Builtin, Args: []string{}, PodAnnotations: []string{}, ContainerAnnotations: []string{}}},
		DefaultNetwork: DefaultNetwork{Name: "minicri", Bridge: "minicri0", Masquerade: true},
		Images: Images{
			CertsDirs: []string{"/etc/minicri/certs.d", "/etc/containerd/certs.d"},
			Pinned:    []string{}, VerifierTimeout: second(10), ProgressTimeout: second(60), MinRate: 1024, MaxDownloads: 3,
		},
		Streaming: Streaming{Address: "127.0.0.1:0", Idle: second(4 * 3600), Creation: second(30), MaxOpen: 1000},
		NRI: NRI{
			Enabled: true, Socket: "/var/run/nri/nri.sock", PluginDir: "/opt/nri/plugins", ConfigDir: "/etc/nri/conf.d",
			Registration: second(5), Request: second(2), Required: []string{}, Reject: []string{},
		},
		Tracing: Tracing{Protocol: "grpc", Insecure: true},
		Limits: Limits{
			Run: second(230), Destroy: second(100), Create: second(100), Kill: second(10),
			CNIAdd: second(180), CNIDel: second(60), CNICheck: second(20), CNIStatus: second(5), CNIGC: second(60),
			DetachTries: 5, DetachTime: second(300), GiveUpTries: 10, GiveUpTime: second(600),
			RetryFirst: second(1), RetryMost: second(300),
			Reload: second(1), Status: second(5), GC: second(600), Shutdown: second(10),
		},
	}
}

// eachField calls do for each field of a table, of the tables in it, and of the handlers by name.
func eachField(table reflect.Value, prefix string, do func(key string, value reflect.Value, tag reflect.StructTag)) {
	for i := range table.NumField() {
		tag, field := table.Type().Field(i).Tag, table.Field(i)
		key := prefix + tag.Get("toml")
		do(key, field, tag)
		if field.Kind() == reflect.Struct {
			eachField(field, key+".", do)
		}
		if handlers, is := field.Interface().(map[string]Runtime); is {
			for _, name := range slices.Sorted(maps.Keys(handlers)) {
				eachField(reflect.ValueOf(handlers[name]), key+"."+name+".", do)
			}
		}
	}
}

// Key describes one key of the configuration.
type Key struct {
	Name    string // the key with its table: "limits.run"
	Table   bool   // whether it is a table, whose keys follow
	Kind    string // the form of its value: text, duration, a number with its bounds, true or false, list
	Default string // as a file has it
	Zero    string // what a zero means, "" if nothing special
	Comment string
	Flag    string // the flag's name, "" if there is none
	Reload  bool
}

// Keys describes all keys, those of tables last.
func Keys() (keys []Key) {
	c := Default()
	c.Runtimes = map[string]Runtime{"NAME": {}}
	flags := c.flagKeys()
	eachField(reflect.ValueOf(c).Elem(), "", func(name string, value reflect.Value, tag reflect.StructTag) {
		key := Key{Name: name, Comment: tag.Get("comment"), Zero: tag.Get("zero"), Reload: IsReloaded(name)}
		switch value.Kind() {
		case reflect.Struct:
			key.Table = true
		case reflect.Map:
			key.Table, key.Name = true, name+".NAME"
		default:
			key.Kind, key.Default = form(value, tag)
		}
		if flags[name] != nil {
			key.Flag = strings.ReplaceAll(name, "_", "-")
		}
		keys = append(keys, key)
	})
	return keys
}

// Value is a key with its value.
type Value struct {
	Name, Text string
	Source     string // "default", FILE:LINE or a flag
}

// Values returns the values of all keys.
func (l *Loaded) Values() (values []Value) {
	eachField(reflect.ValueOf(l.Config).Elem(), "", func(name string, value reflect.Value, tag reflect.StructTag) {
		if value.Kind() != reflect.Struct && value.Kind() != reflect.Map { // whose fields follow
			_, text := form(value, tag)
			values = append(values, Value{Name: name, Text: text, Source: cmp.Or(l.Sources[name], "default")})
		}
	})
	return values
}

// form returns the kind of a value, and the value as a file has it.
func form(v reflect.Value, tag reflect.StructTag) (kind, text string) {
	switch value := v.Interface().(type) {
	case Duration:
		return "duration", fmt.Sprintf("'%v'", time.Duration(value))
	case string:
		return "text", quoted(value)
	case bool:
		return "true or false", fmt.Sprint(value)
	case []string:
		var texts []string
		for _, text := range value {
			texts = append(texts, quoted(text))
		}
		return "list of texts", "[" + strings.Join(texts, ", ") + "]"
	default:
		return fmt.Sprintf("number, %s to %s", tag.Get("least"), tag.Get("most")), fmt.Sprint(value)
	}
}

func quoted(text string) string {
	if strings.ContainsAny(text, "'\n\r") {
		return strconv.Quote(text)
	}
	return "'" + text + "'"
}
