// Package containerd converts containerd's configuration, of version 2 to 4, into minicri's, by a table of keys.
// Comments of the new file name what has no counterpart. The package owns nothing and keeps no state.
package containerd

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/redact"
)

type conversion struct {
	file   map[string]any
	notes  []string
	unused []string // keys without a meaning for minicri, and tables that it does not read
	usual  map[string]any
}

// Convert returns a file of minicri for one of containerd, with comments on what has no counterpart.
func Convert(data []byte) ([]byte, error) {
	var file map[string]any
	if err := toml.Unmarshal(data, &file); err != nil {
		return nil, fmt.Errorf("it is no TOML: %w", err)
	}
	if _, is := file["crio"]; is {
		return nil, errors.New("it is a configuration of CRI-O: docs/from-containerd.md names the keys, this command converts only containerd's")
	}
	if version, _ := file["version"].(int64); version < 2 || version > 4 {
		return nil, fmt.Errorf("its version is %d, and this command converts 2, 3 and 4: 'containerd config migrate' makes a later version of it", version)
	}
	delete(file, "version")
	values := map[string]any{}
	flatten(values, "", file)
	c := conversion{file: map[string]any{}, usual: defaults()}
	for _, name := range []string{"root", "state"} { // first: they decide about the disk
		c.key(name, cmp.Or[any](values[name], ""), rules())
		delete(values, name)
	}
	handlers := c.runtimes(values)
	name, _ := values[defaultRuntimeName].(string)
	delete(values, defaultRuntimeName)
	tracing(values)
	known := rules()
	for _, name := range slices.Sorted(maps.Keys(values)) {
		c.key(name, values[name], known)
	}
	if err := c.settle(); err != nil {
		return nil, err
	}
	c.defaultRuntime(cmp.Or(name, usualRuntime), handlers)
	return c.bytes()
}

// sameName: CRI is one plugin in version 2, and several in version 3; servers are plugins in version 4.
var sameName = strings.NewReplacer("plugins.io.containerd.server.v1.", "",
	"plugins.io.containerd.grpc.v1.cri", "cri", "plugins.io.containerd.cri.v1.images", "cri", "plugins.io.containerd.cri.v1.runtime", "cri")

func flatten(values map[string]any, prefix string, table map[string]any) {
	for key, value := range table {
		name := sameName.Replace(prefix + key)
		if inner, is := value.(map[string]any); is {
			flatten(values, name+".", inner)
			continue
		}
		values[name] = value
	}
}

// defaults returns minicri's default of each key.
func defaults() map[string]any {
	var tables map[string]any
	text, err := toml.Marshal(config.Default())
	if err != nil || toml.Unmarshal(text, &tables) != nil {
		return nil // then each key is written
	}
	values := map[string]any{}
	flatten(values, "", tables)
	return values
}

// same compares values of two files, durations by their length.
func same(a, b any) bool {
	x, err := time.ParseDuration(fmt.Sprint(a))
	y, otherErr := time.ParseDuration(fmt.Sprint(b))
	return err == nil && otherErr == nil && x == y || fmt.Sprint(a) == fmt.Sprint(b)
}

func (c *conversion) key(name string, value any, known map[string]rule) {
	r, is := known[name]
	switch {
	case strings.HasPrefix(name, "cri.registry.mirrors."):
		c.note("%s = %s: write a HOST/hosts.toml in /etc/minicri/certs.d", name, redact.Text(fmt.Sprint(value)))
	case !is && strings.HasPrefix(name, "cri.registry."): // configs, auths and headers have secrets
		c.note("%s: credentials belong into a docker config.json that the key images.docker_config names, certificates and headers into hosts.toml", name)
	case !is && !empty(value) && (strings.HasPrefix(name, "cri.") || !strings.Contains(name, ".")):
		c.note("%s = %v: minicri has no such key", name, value)
	case !is && empty(value):
	case !is:
		c.unread(tableOf(name))
	case reflect.DeepEqual(value, r.usual) || value == "":
	case value == "/opt/containerd/image-verifier/bin": // which need not be there
		c.note("%s = %v: if that is there, name it by the key '%s'", name, value, r.to)
	case r.to != "":
		if r.as != nil {
			value = r.as(value)
		}
		c.set(r.to, value)
	case r.why != "":
		c.note("%s = %v: %s", name, value, r.why)
	case !empty(value):
		c.unread(name)
	}
}

// unread notes a key or a table without a meaning for minicri, once.
func (c *conversion) unread(name string) {
	if !slices.Contains(c.unused, name) {
		c.unused = append(c.unused, name)
	}
}

// tableOf returns the plugin of a key, "plugins.io.containerd.gc.v1.scheduler", or the key of a small table.
func tableOf(name string) string {
	words := strings.Split(name, ".")
	most, is := map[string]int{"plugins": 6, "proxy_plugins": 2, "stream_processors": 1, "timeouts": 1}[words[0]]
	if !is {
		return name
	}
	return strings.Join(words[:min(len(words), most)], ".")
}

func empty(value any) bool {
	v := reflect.ValueOf(value)
	return v.IsZero() || v.Kind() == reflect.Slice && v.Len() == 0
}

func (c *conversion) note(format string, a ...any) {
	c.notes = append(c.notes, fmt.Sprintf(format, a...))
}

func (c *conversion) set(key string, value any) {
	if value != nil && !same(value, c.usual[key]) {
		c.put(key, value)
	}
}

func (c *conversion) put(key string, value any) {
	table, path := c.file, strings.Split(key, ".")
	for _, name := range path[:len(path)-1] {
		if table[name] == nil {
			table[name] = map[string]any{}
		}
		table = table[name].(map[string]any)
	}
	table[path[len(path)-1]] = value
}

// runtimes converts the handlers, and moves their keys from values into its result.
func (c *conversion) runtimes(values map[string]any) map[string]map[string]any {
	handlers := map[string]map[string]any{}
	for key, value := range values {
		if rest, is := strings.CutPrefix(key, "cri.containerd.runtimes."); is {
			name, rest, _ := strings.Cut(rest, ".")
			if handlers[name] == nil {
				handlers[name] = map[string]any{}
			}
			handlers[name][rest] = value
			delete(values, key)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(handlers)) {
		c.runtime(name, handlers[name])
	}
	return handlers
}

const (
	defaultRuntimeName = "cri.containerd.default_runtime_name"
	usualRuntime       = "runc" // the default of containerd and of minicri
)

// defaultRuntime names containerd's default handler, unless that is minicri's default, too.
func (c *conversion) defaultRuntime(name string, handlers map[string]map[string]any) {
	made, _ := c.file["runtimes"].(map[string]any)
	table, _ := made[name].(map[string]any)
	plain := len(table) == 1 && table["type"] == config.Builtin
	switch {
	case table != nil && (name != usualRuntime || !plain):
		c.set("default_runtime", name)
	case table == nil && (name != usualRuntime || handlers[name] != nil):
		c.note("containerd.default_runtime_name = %s: there is no such handler here, pods without a RuntimeClass get the plain builtin one", name)
	}
}

const samplingRatio = "plugins.io.containerd.internal.v1.tracing.sampling_ratio"

// tracing makes an address of the endpoint, which is a URL for containerd's default protocol.
func tracing(values map[string]any) {
	const prefix = "plugins.io.containerd.tracing.processor.v1.otlp."
	endpoint, _ := values[prefix+"endpoint"].(string)
	if endpoint == "" {
		return
	}
	if values[prefix+"insecure"] == nil { // containerd's default is TLS
		values[prefix+"insecure"] = false
	}
	if u, err := url.Parse(endpoint); err == nil && u.Host != "" {
		values[prefix+"endpoint"] = u.Host
		values[prefix+"insecure"] = u.Scheme == "http" // the scheme decides (OTLP exporter of OpenTelemetry)
	}
	if values[samplingRatio] == nil { // containerd's default is to trace each call
		values[samplingRatio] = 1.0
	}
	if protocol := values[prefix+"protocol"]; protocol == nil || protocol == "" || protocol == "http/protobuf" {
		values[prefix+"protocol"] = "http"
	}
}

func (c *conversion) settle() error {
	for {
		err := c.check()
		if err == nil {
			return nil
		}
		first, _, _ := strings.Cut(err.Error(), "\n")
		keys, reason, _ := strings.Cut(first, ": ")
		noted := len(c.notes)
		for key := range strings.SplitSeq(keys, ", ") {
			if key, value := c.take(key); value != nil {
				c.note("%s = %v: minicri refuses %s: %s", key, value, keys, reason)
			}
		}
		if len(c.notes) == noted {
			return fmt.Errorf("what it becomes is not valid: %w", err)
		}
	}
}

// check returns an error that begins with its keys.
func (c *conversion) check() error {
	text, err := toml.Marshal(c.file)
	if err != nil {
		return err
	}
	made := config.Default()
	err = toml.Unmarshal(text, made)
	if wrong, is := errors.AsType[*toml.DecodeError](err); is {
		return fmt.Errorf("%s: %w", strings.Join(wrong.Key(), "."), err)
	}
	return errors.Join(err, made.Check())
}

// take removes a key and returns it. Of a handler it removes all: without one it is another runtime.
func (c *conversion) take(key string) (taken string, value any) {
	path := strings.Split(key, ".")
	if path[0] == "runtimes" && len(path) > 2 {
		path = path[:2]
	}
	table := c.file
	for _, name := range path[:len(path)-1] {
		table, _ = table[name].(map[string]any)
	}
	last := path[len(path)-1]
	value = table[last]
	delete(table, last)
	return strings.Join(path, "."), value
}

// runtime converts one handler. Libcontainer, which is runc's, takes the place of runc.
func (c *conversion) runtime(name string, handler map[string]any) {
	kind, _ := handler["runtime_type"].(string)
	program, _ := handler["options.BinaryName"].(string)
	if kind == "" && name == usualRuntime { // containerd merges the file with its own default
		kind = "io.containerd.runc.v2"
	}
	table := "runtimes." + name + "."
	switch {
	case kind == "io.containerd.runc.v2" && (program == "" || filepath.Base(program) == "runc"):
		c.put(table+"type", "builtin")
	case kind == "io.containerd.runc.v2" && filepath.IsAbs(program), kind == "io.containerd.runsc.v1":
		c.put(table+"type", "oci")
		c.put(table+"path", cmp.Or(program, "/usr/local/bin/runsc"))
		if kind == "io.containerd.runsc.v1" || filepath.Base(program) == "runsc" {
			c.put(table+"sandbox_per_container", true)
			c.put(table+"args", []string{"--network=host"}) // else the second container of a pod has no network
		}
	default:
		c.note("runtime handler %s (%s): minicri runs programs with runc's command line, by their absolute path; see docs/runtimes.md",
			name, strings.TrimSpace(kind+" "+program))
		return
	}
	for _, key := range slices.Sorted(maps.Keys(handler)) {
		value := handler[key]
		if empty(value) {
			continue
		}
		switch key {
		case "privileged_without_host_devices", "pod_annotations", "container_annotations", "cni_conf_dir":
			c.put(table+key, value)
		case "base_runtime_spec":
			c.put(table+"base_spec", value)
		case "cgroup_writable":
			c.note("runtime handler %s, %s = %v: minicri has this key for all handlers together; set it if all may write their cgroups", name, key, value)
		case "options.SystemdCgroup":
			c.set("cgroup_driver", driver(value))
		case "runtime_type", "options.BinaryName", "sandboxer", "sandbox_mode", "options.BinaryPath", "io_type":
		default:
			c.note("runtime handler %s, %s = %v: minicri has no such key", name, key, value)
		}
	}
}

func (c *conversion) bytes() ([]byte, error) {
	var b bytes.Buffer
	b.WriteString("# Made of containerd's configuration by 'minicri config from-containerd'.\n")
	if len(c.notes) > 0 {
		b.WriteString("# These have no counterpart, or are refused:\n")
	}
	for _, note := range c.notes {
		b.WriteString("#  " + strings.Join(strings.Fields(note), " ") + "\n")
	}
	if len(c.unused) > 0 {
		b.WriteString("# Not used by minicri: " + strings.Join(c.unused, ", ") + "\n")
	}
	b.WriteByte('\n')
	err := toml.NewEncoder(&b).SetIndentTables(false).Encode(c.file)
	return b.Bytes(), err
}

// logLevel and driver return nil if no key is needed.
func logLevel(value any) any {
	return map[string]any{"trace": "debug", "debug": "debug", "fatal": "error", "panic": "error", "error": "error", "warn": "warn", "warning": "warn"}[fmt.Sprint(value)]
}

func not(value any) any { return value == false }

// perMillion converts a ratio of traced calls.
func perMillion(value any) any {
	ratio, is := value.(float64)
	if !is {
		return value
	}
	return int64(ratio * 1e6)
}

func driver(value any) any { return map[string]any{"true": "systemd"}[fmt.Sprint(value)] }

func directories(value any) any {
	text, _ := value.(string)
	return filepath.SplitList(text)
}

func joined(value any) any {
	all, isList := value.([]any)
	if !isList {
		return value
	}
	var list []string
	for _, one := range all {
		list = append(list, fmt.Sprint(one))
	}
	return strings.Join(list, ":")
}

// rule says what becomes of a key of containerd.
type rule struct {
	usual   any    // the value that changes nothing, for a key without a counterpart; nil for none
	to, why string // minicri's key, or why there is none; neither for a key of no use
	as      func(any) any
}

const (
	always  = "minicri always does"
	never   = "there is no such thing in minicri"
	kubelet = "the kubelet decides"
	reject  = "the key 'nri.reject' has a list of such things"
)

// rules are by key; CRI's plugins have the prefix cri in all versions.
func rules() map[string]rule {
	all := map[string]rule{
		"root": {usual: "/var/lib/containerd", why: "minicri keeps images and containers in /var/lib/minicri; to use this disk, set the key 'root' to " +
			"another directory of it"},
		"state":   {usual: "/run/containerd", why: "the key 'state' sets the directory of minicri, /run/minicri"},
		"imports": {usual: []any{}, why: "the imported files are not read: convert the output of 'containerd config dump'"},
		"temp":    {}, "plugin_dir": {}, "required_plugins": {},
		"disabled_plugins": {usual: []any{}, why: "minicri has no plugins to disable, and always has the CRI"},
		"oom_score":        {usual: int64(0), why: "OOMScoreAdjust of the systemd unit has this value for minicri"},
		"grpc.address":     {usual: "/run/containerd/containerd.sock", why: "minicri's socket is /run/minicri/minicri.sock; the key 'socket' moves it"},
		"debug.level":      {to: "log_level", as: logLevel},
		"debug.format":     {to: "log_format"},
		"metrics.address":  {to: "metrics_address"},
		"plugins.io.containerd.nri.v1.nri.disable":                                                     {to: "nri.enabled", as: not},
		"plugins.io.containerd.nri.v1.nri.socket_path":                                                 {to: "nri.socket"},
		"plugins.io.containerd.nri.v1.nri.plugin_path":                                                 {to: "nri.plugin_dir"},
		"plugins.io.containerd.nri.v1.nri.plugin_config_path":                                          {to: "nri.config_dir"},
		"plugins.io.containerd.nri.v1.nri.disable_connections":                                         {usual: false},
		"plugins.io.containerd.nri.v1.nri.plugin_registration_timeout":                                 {to: "nri.registration_timeout"},
		"plugins.io.containerd.nri.v1.nri.plugin_request_timeout":                                      {to: "nri.request_timeout"},
		"plugins.io.containerd.nri.v1.nri.default_validator.required_plugins":                          {usual: []any{}, why: "the key 'nri.required_plugins' has this list"},
		"plugins.io.containerd.nri.v1.nri.default_validator.tolerate_missing_plugins_annotation":       {to: "nri.tolerate_missing_annotation"},
		"plugins.io.containerd.image-verifier.v1.bindir.bin_dir":                                       {to: "images.verifier_dir"},
		"plugins.io.containerd.image-verifier.v1.bindir.max_verifiers":                                 {usual: int64(10), why: "all verifiers are asked"},
		"plugins.io.containerd.image-verifier.v1.bindir.per_verifier_timeout":                          {to: "images.verifier_timeout"},
		"plugins.io.containerd.nri.v1.nri.default_validator.reject_oci_hook_adjustment":                {usual: false, why: reject},
		"plugins.io.containerd.nri.v1.nri.default_validator.reject_namespace_adjustment":               {usual: false, why: reject},
		"plugins.io.containerd.nri.v1.nri.default_validator.reject_sysctl_adjustment":                  {usual: false, why: reject},
		"plugins.io.containerd.nri.v1.nri.default_validator.reject_runtime_default_seccomp_adjustment": {usual: false, why: reject},
		"plugins.io.containerd.nri.v1.nri.default_validator.reject_unconfined_seccomp_adjustment":      {usual: false, why: reject},
		"plugins.io.containerd.nri.v1.nri.default_validator.reject_custom_seccomp_adjustment":          {usual: false, why: reject},
		"plugins.io.containerd.tracing.processor.v1.otlp.endpoint":                                     {to: "tracing.endpoint"},
		"plugins.io.containerd.tracing.processor.v1.otlp.insecure":                                     {to: "tracing.insecure"},
		"plugins.io.containerd.tracing.processor.v1.otlp.protocol":                                     {to: "tracing.protocol"},
		"plugins.io.containerd.internal.v1.tracing.service_name":                                       {usual: "containerd"},
		samplingRatio: {to: "tracing.sampling_rate_per_million", as: perMillion},
		"plugins.io.containerd.transfer.v1.local.max_concurrent_downloads": {to: "images.max_downloads"},
	}
	maps.Copy(all, rulesOfCRI())
	return all
}

func rulesOfCRI() map[string]rule {
	return map[string]rule{
		"cri.sandbox_image": {}, "cri.pinned_images.sandbox": {}, // pause is embedded
		"cri.max_concurrent_downloads":     {to: "images.max_downloads"},
		"cri.image_pull_progress_timeout":  {to: "images.progress_timeout"},
		"cri.image_pull_with_sync_fs":      {usual: false},
		"cri.snapshotter":                  {usual: "overlayfs", why: "minicri has overlay alone"},
		"cri.containerd.snapshotter":       {usual: "overlayfs", why: "minicri has overlay alone"},
		"cri.discard_unpacked_layers":      {to: "images.keep_layers", as: not},
		"cri.registry.config_path":         {to: "images.certs_dirs", as: directories},
		"cri.disable_snapshot_annotations": {}, "cri.stats_collect_period": {}, "cri.use_local_image_pull": {},
		"cri.max_concurrent_unpacks": {usual: int64(1), why: "minicri unpacks the layers of an image one after the other"},
		"cri.enable_selinux":         {usual: false, why: "minicri labels containers where SELinux is on"}, "cri.selinux_category_range": {usual: int64(1024), why: never},
		"cri.max_container_log_line_size": {usual: int64(16384), why: never}, "cri.max_container_log_size": {usual: int64(16384), why: never},
		"cri.disable_apparmor": {usual: false, why: kubelet}, "cri.restrict_oom_score_adj": {usual: false, why: never},
		"cri.unset_seccomp_profile": {to: "default_seccomp"}, "cri.disable_cgroup": {usual: false, why: never},
		"cri.disable_proc_mount": {usual: false, why: never}, "cri.disable_hugetlb_controller": {usual: true},
		"cri.tolerate_missing_hugetlb_controller":    {usual: true},
		"cri.device_ownership_from_security_context": {to: "device_ownership_from_security_context"},
		"cri.ignore_image_defined_volumes":           {usual: false, why: never},
		"cri.netns_mounts_under_state_dir":           {usual: false, why: "the key 'netns_dir' says where they are pinned"},
		"cri.enable_unprivileged_ports":              {usual: true, why: always}, "cri.enable_unprivileged_icmp": {usual: true, why: always},
		"cri.enable_cdi": {usual: true, why: always}, "cri.enable_criu": {usual: true, why: never},
		"cri.cdi_spec_dirs":              {to: "cdi_spec_dirs"},
		"cri.drain_exec_sync_io_timeout": {}, "cri.ignore_deprecation_warnings": {}, "cri.stats_retention_period": {},
		"cri.systemd_cgroup": {to: "cgroup_driver", as: driver}, "cri.image_decryption.key_model": {usual: "node", why: never},
		"cri.containerd.default_runtime_name":              {usual: "runc", to: "default_runtime"},
		"cri.containerd.ignore_blockio_not_enabled_errors": {}, "cri.containerd.ignore_rdt_not_enabled_errors": {},
		"cri.containerd.disable_snapshot_annotations": {},
		"cri.containerd.discard_unpacked_layers":      {to: "images.keep_layers", as: not},
		"cri.containerd.no_pivot":                     {usual: false, why: never},
		"cri.cni.bin_dir":                             {usual: "/opt/cni/bin", to: "cni_bin_dir"},
		"cri.cni.bin_dirs":                            {usual: []any{"/opt/cni/bin"}, to: "cni_bin_dir", as: joined},
		"cri.cni.conf_dir":                            {to: "cni_conf_dir"},
		"cri.cni.max_conf_num":                        {usual: int64(1), why: "minicri uses the first network alone"},
		"cri.cni.conf_template":                       {usual: "", why: "the table default_network makes a network of the node's pod CIDR"},
		"cri.cni.ip_pref":                             {usual: "", why: never},
		"cri.cni.setup_serially":                      {}, "cri.cni.use_internal_loopback": {}, "cri.disable_tcp_service": {},
		"cri.stream_server_address": {usual: "127.0.0.1"}, "cri.stream_server_port": {usual: "0"},
		"cri.stream_idle_timeout":                   {to: "streaming.idle_timeout"},
		"cri.enable_tls_streaming":                  {usual: false},
		"cri.x509_key_pair_streaming.tls_cert_file": {to: "streaming.tls_cert"},
		"cri.x509_key_pair_streaming.tls_key_file":  {to: "streaming.tls_key"},
	}
}
