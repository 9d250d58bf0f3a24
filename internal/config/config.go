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
	Containerd  string `toml:"containerd_socket" need:"path?" comment:"unix socket where the kubelet's cAdvisor looks for containerd, mode 0600: minicri serves it beside socket, unless another runtime does; '' is none, and then the kubelet's /metrics/cadvisor has no series of containers"`
	Root        string `toml:"root" need:"path" comment:"directory of what has to survive a reboot"`
	State       string `toml:"state" need:"path" comment:"directory of what a reboot may remove; at most 72 characters, because sockets are below it"`
	NetnsDir    string `toml:"netns_dir" need:"path" comment:"directory where network namespaces are pinned, by the path that plugins and their agents get"`
	CNIConf     string `toml:"cni_conf_dir" need:"path" comment:"directory of network configurations; the first valid one by name is used"`
	CNIBin      string `toml:"cni_bin_dir" need:"paths" comment:"directories of network plugins, separated by ':'"`
	Shim        string `toml:"shim" need:"path?" comment:"path of minicri-shim; '' is the one in the daemon's own directory"`
	LogLevel    string `toml:"log_level" reload:"yes" comment:"debug, info, warn or error"`
	LogFormat   string `toml:"log_format" need:"text or json" comment:"text or json"`
	Metrics     string `toml:"metrics_address" need:"endpoint?" comment:"TCP address of Prometheus metrics (/metrics), such as 127.0.0.1:9440; '' disables them"`
	MetricsCert string `toml:"metrics_tls_cert" need:"path?" comment:"PEM file of a certificate for metrics_address, with metrics_tls_key; '' is no TLS"`
	MetricsKey  string `toml:"metrics_tls_key" need:"path?" comment:"PEM file of the certificate's key"`

	CgroupDriver string `toml:"cgroup_driver" need:"cgroupfs or systemd?" comment:"cgroupfs or systemd; '' is systemd where it manages a machine with cgroup v2, else cgroupfs"`
	CgroupParent string `toml:"cgroup_parent" comment:"cgroup of pods that name none; '' is /minicri, or system.slice with the driver systemd"`

	DefaultUlimits       []string `toml:"default_ulimits" need:"ulimit" comment:"limits of a container's processes, each name=soft:hard as in 'nofile=1024:524288', -1 for none; others are nofile=1024:524288, nproc and core without a limit, and the kernel's own defaults"`
	DefaultEnv           []string `toml:"default_env" need:"pair" comment:"variables of all containers, each NAME=VALUE; image and container may set them anew"`
	DefaultSysctls       []string `toml:"default_sysctls" need:"sysctl" comment:"kernel parameters of all pods, each name=value; a pod may set them anew, and pods that share the namespace with the node do without"`
	DefaultCapabilities  []string `toml:"default_capabilities" need:"capability" comment:"capabilities of a container that is not privileged, before it adds and drops its own; [] is those of containerd"`
	DefaultSeccomp       string   `toml:"default_seccomp" need:"profile?" comment:"seccomp profile of containers that ask for none: runtime/default, unconfined or localhost/ and the path of a file; '' is unconfined"`
	DefaultAppArmor      string   `toml:"default_apparmor" need:"profile?" comment:"AppArmor profile of containers that ask for none: runtime/default, unconfined or localhost/ and the name of a loaded profile; '' is runtime/default"`
	CDIDirs              []string `toml:"cdi_spec_dirs" need:"path" comment:"directories of CDI specifications, those of later ones count"`
	ShmSize              int64    `toml:"shm_size" least:"4096" most:"1099511627776" comment:"size of a pod's /dev/shm in bytes"`
	BaseSpec             string   `toml:"base_spec" need:"path?" comment:"file with a runtime-spec (config.json) that the spec of each container begins with, read at the start; '' is an empty one"`
	PodAnnotations       []string `toml:"pod_annotations" need:"pattern" comment:"annotations of pods that are passed on in the runtime-spec of containers, where hooks find them; '*' matches all but a '/'"`
	ContainerAnnotations []string `toml:"container_annotations" need:"pattern" comment:"the same for annotations of containers"`
	DeviceOwnership      bool     `toml:"device_ownership_from_security_context" comment:"whether the devices of a container belong to its runAsUser and runAsGroup, instead of their owner on the node"`
	CgroupWritable       bool     `toml:"cgroup_writable" comment:"whether containers may write to their own cgroups; needs cgroup v2 mounted with nsdelegate"`
	PidsLimit            int64    `toml:"pids_limit" least:"0" most:"4194304" zero:"no limit" comment:"maximum number of processes of a container"`
	DefaultRuntime       string   `toml:"default_runtime" reload:"yes" comment:"the runtime handler of pods that name none, kept by pods that are there; '' is type builtin"`

	DefaultNetwork DefaultNetwork     `toml:"default_network" reload:"yes" comment:"a bridge network, used while cni_conf_dir has no configuration"`
	Images         Images             `toml:"images" reload:"yes" comment:"pulling and keeping images"`
	Streaming      Streaming          `toml:"streaming" comment:"exec, attach and port-forward"`
	NRI            NRI                `toml:"nri" reload:"yes" comment:"plugins of the Node Resource Interface, which adjust pods and containers"`
	Tracing        Tracing            `toml:"tracing" comment:"spans of OpenTelemetry, for calls, steps, plugins and layers"`
	Limits         Limits             `toml:"limits" reload:"yes" comment:"how long operations may take, and how often they are tried"`
	Runtimes       map[string]Runtime `toml:"runtimes" reload:"yes" comment:"the runtime handlers that a RuntimeClass may name; pods without a RuntimeClass use that of default_runtime"`
}

// The types of runtime handlers.
const (
	Builtin = "builtin" // libcontainer in minicri-shim
	OCI     = "oci"     // a program with runc's command line
)

// Runtime is one runtime handler.
type Runtime struct {
	Type string   `toml:"type" comment:"what runs the handler's containers: builtin is libcontainer in minicri-shim, oci a program with runc's command line, such as runc, crun and youki"`
	Path string   `toml:"path" need:"path?" comment:"the program of the type oci"`
	Args []string `toml:"args" comment:"global flags of the program, before its verb"`
	// The rest is for this handler alone.
	PrivilegedWithoutHostDevices bool     `toml:"privileged_without_host_devices" comment:"whether privileged containers have only the devices that they ask for, and may use any"`
	PodAnnotations               []string `toml:"pod_annotations" need:"pattern" comment:"further annotations of pods that are passed on, as the key pod_annotations of all handlers has them"`
	ContainerAnnotations         []string `toml:"container_annotations" need:"pattern" comment:"the same for annotations of containers"`
	BaseSpec                     string   `toml:"base_spec" need:"path?" comment:"a base_spec instead of that of all handlers; '' is that one"`
	CNIConf                      string   `toml:"cni_conf_dir" need:"path?" comment:"directory of network configurations for pods of this handler; '' is that of all handlers. default_network does not stand in for it"`
	SandboxPerContainer          bool     `toml:"sandbox_per_container" comment:"for programs of the type oci that make a sandbox, such as runsc: each container has one of its own, and is not said to be part of a pod"`
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
	Enabled    bool   `toml:"enabled" comment:"whether it is used while cni_conf_dir has no configuration"`
	Name       string `toml:"name" need:"network" comment:"name of the network, as plugins and their files see it"`
	Bridge     string `toml:"bridge" need:"link" comment:"name of the bridge, at most 15 characters"`
	Subnet     string `toml:"subnet" comment:"a subnet, or an IPv4 and an IPv6 one separated by ','; '' is the pod CIDR that the kubelet sends"`
	Masquerade bool   `toml:"masquerade" comment:"whether what pods send out of the subnet gets the node's address; false where every other node has a route to the pods"`
	DataDir    string `toml:"data_dir" need:"path?" comment:"where addresses are recorded; '' is the plugin's own default"`
}

// Images says how images are pulled and kept.
type Images struct {
	CertsDirs       []string `toml:"certs_dirs" need:"path" comment:"searched in order for HOST/hosts.toml, at each pull"`
	DockerConfig    string   `toml:"docker_config" need:"path?" comment:"a docker config.json with credentials, or the names of credential helpers in the daemon's PATH, for pulls that bring none"`
	VerifierDir     string   `toml:"verifier_dir" need:"path?" comment:"directory of programs that all have to accept an image before it is fetched"`
	Pinned          []string `toml:"pinned" need:"reference" comment:"references of images that the kubelet must not collect"`
	VerifierTimeout Duration `toml:"verifier_timeout" comment:"how long one of them may take"`
	ProgressTimeout Duration `toml:"progress_timeout" comment:"ends a pull whose registry sends no byte for this long"`
	MinRate         int      `toml:"min_rate" least:"0" most:"1073741824" comment:"ends a pull whose registry sends fewer bytes per second on average over progress_timeout; 0 is no minimum"`
	MaxDownloads    int      `toml:"max_downloads" least:"1" most:"256" comment:"number of blobs that one pull fetches at once"`
	KeepLayers      bool     `toml:"keep_layers" comment:"whether the layers of images that are pulled or imported from now on stay as they came, compressed, beside the unpacked ones: 'minicri image save' writes the registry's bytes then, and the disk holds both"`
}

// Streaming says where exec, attach and port-forward are served.
type Streaming struct {
	Address    string   `toml:"address" need:"endpoint" comment:"TCP address; the kubelet connects to it, so loopback is enough. Port 0 is any free one"`
	TLSCert    string   `toml:"tls_cert" need:"path?" comment:"PEM file of a certificate, with tls_key; '' is no TLS"`
	TLSKey     string   `toml:"tls_key" need:"path?" comment:"PEM file of the certificate's key"`
	SelfSigned bool     `toml:"tls_self_signed" comment:"TLS with a certificate that the daemon makes for itself"`
	Idle       Duration `toml:"idle_timeout" comment:"ends a session that is silent for this long"`
	Creation   Duration `toml:"creation_timeout" comment:"how long a client of exec or attach may take to open its streams"`
	MaxOpen    int      `toml:"max_open" least:"1" most:"1000000" comment:"maximum number of concurrent sessions"`
}

// NRI says where the plugins of the Node Resource Interface come from.
type NRI struct {
	Enabled      bool     `toml:"enabled" comment:"whether NRI plugins take part in the lives of pods and containers"`
	Socket       string   `toml:"socket" need:"path?" comment:"unix socket where plugins connect; '' is none; while another runtime serves it, only the plugins of plugin_dir take part"`
	PluginDir    string   `toml:"plugin_dir" need:"path" comment:"directory of plugins that the daemon starts, each named INDEX-NAME with an index of two digits; it need not be there"`
	ConfigDir    string   `toml:"config_dir" need:"path" comment:"directory of their configurations, INDEX-NAME.conf or NAME.conf; it need not be there"`
	Registration Duration `toml:"registration_timeout" comment:"how long a plugin that has connected may take to register"`
	Request      Duration `toml:"request_timeout" comment:"how long a plugin may take for an answer; then it is disconnected, unless it has asked to stay, and pods do without it"`
	Required     []string `toml:"required_plugins" need:"plugin" comment:"names of plugins, with their index or without, that have to be connected when a pod or a container is made"`
	Tolerate     string   `toml:"tolerate_missing_annotation" comment:"annotation of pods which says with 'true' that they do without required plugins; '' is none"`
	Reject       []string `toml:"reject" need:"hooks or namespaces or sysctls or seccomp" comment:"adjustments that no plugin may make: hooks, namespaces, sysctls, seccomp"`
}

// Tracing says where spans are sent.
type Tracing struct {
	Endpoint   string `toml:"endpoint" need:"endpoint?" comment:"TCP address of an OTLP collector, such as 127.0.0.1:4317; '' is no tracing"`
	Protocol   string `toml:"protocol" need:"grpc or http" comment:"grpc or http"`
	Insecure   bool   `toml:"insecure" comment:"whether the collector is spoken to without TLS"`
	PerMillion int    `toml:"sampling_rate_per_million" least:"0" most:"1000000" comment:"how many of a million calls are traced that come without a decision of their caller; the kubelet's decision is kept"`
}

// Limits are how long operations may take, and how often they are tried.
type Limits struct {
	Run         Duration `toml:"run" comment:"RunPodSandbox, all steps together"`
	Destroy     Duration `toml:"destroy" comment:"teardown of a sandbox"`
	Create      Duration `toml:"create" comment:"CreateContainer or StartContainer, all steps together"`
	Kill        Duration `toml:"kill" comment:"how long a process may take to end after SIGKILL"`
	CNIAdd      Duration `toml:"cni_add" comment:"CNI ADD of one network, all its plugins; then their processes are killed"`
	CNIDel      Duration `toml:"cni_del" comment:"DEL of one plugin; then its processes are killed, and the other plugins get their DEL"`
	CNICheck    Duration `toml:"cni_check" comment:"as cni_add, for CHECK"`
	CNIStatus   Duration `toml:"cni_status" comment:"as cni_add, for STATUS"`
	CNIGC       Duration `toml:"cni_gc" comment:"as cni_add, for GC"`
	DetachTries int      `toml:"detach_tries" least:"1" most:"1000000" comment:"number of StopPodSandbox calls that a failing DEL may fail; DELs in the background do not count. The pod is deleted after that, or after detach_time"`
	DetachTime  Duration `toml:"detach_time" zero:"not at all" comment:"how long after its first failure a DEL may fail StopPodSandbox; detach_tries may end that earlier"`
	GiveUpTries int      `toml:"give_up_tries" least:"1" most:"1000000" comment:"number of failed DELs after which an attachment is given up whose ADD never succeeded"`
	GiveUpTime  Duration `toml:"give_up_time" zero:"at the second failure" comment:"how long after the first failed DEL such an attachment is given up at the latest"`
	RetryFirst  Duration `toml:"retry_first" comment:"delay before a failed DEL is retried in the background; it doubles"`
	RetryMost   Duration `toml:"retry_most" comment:"the longest such delay"`
	Reload      Duration `toml:"reload" comment:"how often cni_conf_dir is read"`
	Status      Duration `toml:"status_period" comment:"how often the plugins are asked for their STATUS"`
	GC          Duration `toml:"gc_period" zero:"never" comment:"pause between the end of one CNI GC and the start of the next"`
	Check       Duration `toml:"check_period" zero:"only at SIGUSR1" comment:"how often CNI CHECK runs for all pods"`
	Shutdown    Duration `toml:"shutdown" comment:"how long running calls may take after SIGTERM"`
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
