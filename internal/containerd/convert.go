package containerd

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/pelletier/go-toml/v2"
)

// conversion is a file of minicri that is being made.
type conversion struct {
	file  map[string]any
	notes []string
}

// Convert is the file of minicri for one of containerd: what it sets, and as comments
// what has no counterpart.
func Convert(data []byte) ([]byte, error) {
	var file map[string]any
	if err := toml.Unmarshal(data, &file); err != nil {
		return nil, fmt.Errorf("it is no TOML: %w", err)
	}
	if version, _ := file["version"].(int64); version != 2 && version != 3 {
		return nil, fmt.Errorf("its version is %d, and 2 and 3 are understood: 'containerd config migrate' prints it as a later one", version)
	}
	values := map[string]any{}
	flatten(values, "", file)
	c := conversion{file: map[string]any{}}
	c.runtimes(values)
	known := rules()
	for _, name := range slices.Sorted(maps.Keys(values)) {
		c.key(name, values[name], known)
	}
	return c.bytes()
}

// sameName are the plugins of CRI, one in version 2 and three in version 3.
var sameName = strings.NewReplacer(
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

func (c *conversion) key(name string, value any, known map[string]rule) {
	r, is := known[name]
	secret := strings.HasPrefix(name, "cri.registry.configs.")
	switch {
	case secret:
		c.note("%s: credentials belong into a docker config.json that the key images.docker_config names, certificates into hosts.toml", name)
	case strings.HasPrefix(name, "cri.registry.mirrors."):
		c.note("%s = %v: write a HOST/hosts.toml in /etc/minicri/certs.d", name, value)
	case !is && empty(value):
	case !is && (strings.HasPrefix(name, "cri.") || !strings.HasPrefix(name, "plugins.") && !strings.Contains(name, ".")):
		c.note("%s = %v: minicri has no such key", name, value)
	case !is || reflect.DeepEqual(value, r.usual) || empty(value) && r.to == "":
	case r.to != "":
		if r.as != nil {
			value = r.as(value)
		}
		c.set(r.to, value)
	case r.why != "":
		c.note("%s = %v: %s", name, value, r.why)
	}
}

func empty(value any) bool {
	v := reflect.ValueOf(value)
	return v.IsZero() || v.Kind() == reflect.Slice && v.Len() == 0
}

func (c *conversion) note(format string, a ...any) {
	c.notes = append(c.notes, fmt.Sprintf(format, a...))
}

// set sets a key, and makes its tables.
func (c *conversion) set(key string, value any) {
	if value == nil {
		return
	}
	table := c.file
	path := strings.Split(key, ".")
	for _, name := range path[:len(path)-1] {
		if table[name] == nil {
			table[name] = map[string]any{}
		}
		table = table[name].(map[string]any)
	}
	table[path[len(path)-1]] = value
}

// runtimes makes the handlers, and takes their keys from the values.
func (c *conversion) runtimes(values map[string]any) {
	const prefix = "cri.containerd.runtimes."
	handlers := map[string]map[string]any{}
	for _, key := range slices.Sorted(maps.Keys(values)) {
		rest, is := strings.CutPrefix(key, prefix)
		if !is {
			continue
		}
		name, rest, _ := strings.Cut(rest, ".")
		if handlers[name] == nil {
			handlers[name] = map[string]any{}
		}
		handlers[name][rest] = values[key]
		delete(values, key)
	}
	for _, name := range slices.Sorted(maps.Keys(handlers)) {
		c.runtime(name, handlers[name])
	}
}

// runtime makes one handler. Where containerd's is runc below its shim, minicri's is
// libcontainer, which is runc's.
func (c *conversion) runtime(name string, handler map[string]any) {
	kind, _ := handler["runtime_type"].(string)
	program, _ := handler["options.BinaryName"].(string)
	table := "runtimes." + name + "."
	switch {
	case kind == "io.containerd.runc.v2" && (program == "" || filepath.Base(program) == "runc"):
		c.set(table+"type", "builtin")
	case kind == "io.containerd.runc.v2" && filepath.IsAbs(program):
		c.set(table+"type", "oci")
		c.set(table+"path", program)
	case kind == "io.containerd.runsc.v1":
		c.set(table+"type", "oci")
		c.set(table+"path", cmp.Or(program, "/usr/local/bin/runsc"))
		c.set(table+"sandbox_per_container", true)
	default:
		c.note("runtime handler %s (%s %s): minicri runs programs with runc's command line, by their absolute path; see docs/runtimes.md", name, kind, program)
		return
	}
	if driver, _ := handler["options.SystemdCgroup"].(bool); driver {
		c.set("cgroup_driver", "systemd")
	}
	for _, key := range slices.Sorted(maps.Keys(handler)) {
		value := handler[key]
		switch key {
		case "privileged_without_host_devices", "pod_annotations", "container_annotations", "cni_conf_dir":
			if !empty(value) {
				c.set(table+key, value)
			}
		case "base_runtime_spec":
			if !empty(value) {
				c.set(table+"base_spec", value)
			}
		case "cgroup_writable":
			if value == true {
				c.set("cgroup_writable", true)
			}
		case "runtime_type", "options.BinaryName", "options.SystemdCgroup", "sandboxer", "sandbox_mode", "options.BinaryPath":
		case "io_type":
		default:
			if !empty(value) {
				c.note("runtime handler %s, %s = %v: minicri has no such key", name, key, value)
			}
		}
	}
}

func (c *conversion) bytes() ([]byte, error) {
	var b bytes.Buffer
	b.WriteString("# Made of containerd's configuration by 'minicri config from-containerd'.\n")
	if len(c.notes) > 0 {
		b.WriteString("# These have no counterpart:\n")
	}
	for _, note := range c.notes {
		b.WriteString("#  " + strings.Join(strings.Fields(note), " ") + "\n")
	}
	b.WriteByte('\n')
	err := toml.NewEncoder(&b).SetIndentTables(false).Encode(c.file)
	return b.Bytes(), err
}

func logLevel(value any) any {
	switch value {
	case "trace", "debug":
		return "debug"
	case "fatal", "panic", "error":
		return "error"
	case "warn", "warning":
		return "warn"
	}
	return nil
}

func not(value any) any { return value == false }

func driver(value any) any {
	if value == true {
		return "systemd"
	}
	return nil
}

// directories is a list that containerd writes with ':' between.
func directories(value any) any {
	text, _ := value.(string)
	return filepath.SplitList(text)
}

func joined(value any) any {
	var list []string
	for _, one := range value.([]any) {
		list = append(list, fmt.Sprint(one))
	}
	return strings.Join(list, ":")
}
