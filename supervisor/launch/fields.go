package launch

import (
	"reflect"
	"strings"
)

// fields are the fields of a type of the runtime-spec that a launch implements, or that are of no concern to it. A path
// names the fields below it, too. A launch refuses all others: a field that a new runtime-spec adds is not ignored.
type fields []string

// processFields belong to the process of an exec. libcontainer starts one with a terminal, a scheduler, a priority or
// an affinity.
var processFields = fields{
	"Args", "Env", "Cwd", "User.UID", "User.GID", "User.Umask", "User.AdditionalGids", "NoNewPrivileges",
	"Capabilities.Bounding", "Capabilities.Effective", "Capabilities.Inheritable", "Capabilities.Permitted",
	"Capabilities.Ambient", "Rlimits.Type", "Rlimits.Hard", "Rlimits.Soft",
	"ApparmorProfile", "SelinuxLabel", "OOMScoreAdj",
}

// containerFields belong to the container of an exec. All but the namespaces and the filter have taken effect at its
// creation.
var containerFields = append(fields{
	"Namespaces.Type", "Namespaces.Path", "UIDMappings", "GIDMappings", "Sysctl", "Resources", "CgroupsPath", "Devices",
	"NetDevices", "RootfsPropagation", "MaskedPaths", "ReadonlyPaths", "MountLabel",
}, below("Seccomp.", filterFields)...)

// filterFields belong to a seccomp profile. compile implements them.
var filterFields = fields{
	"DefaultAction", "DefaultErrnoRet", "Architectures", "Flags",
	"Syscalls.Names", "Syscalls.Action", "Syscalls.ErrnoRet",
	"Syscalls.Args.Index", "Syscalls.Args.Value", "Syscalls.Args.ValueTwo", "Syscalls.Args.Op",
}

// pauseFields belong to the spec of a pause.
var pauseFields = append(fields{
	"Version", "Root.Path", "Root.Readonly", "Hostname", "Domainname", "Annotations",
	"Mounts.Destination", "Mounts.Type", "Mounts.Source", "Mounts.Options",
	"Process.Args", "Process.Cwd", "Process.User.UID", "Process.User.GID", "Process.User.AdditionalGids",
	"Process.NoNewPrivileges", "Process.Capabilities", "Process.OOMScoreAdj",
	"Linux.Namespaces.Type", "Linux.Namespaces.Path", "Linux.Sysctl", "Linux.CgroupsPath", "Linux.Resources.CPU.Shares",
}, below("Linux.Seccomp.", filterFields)...)

func below(prefix string, all fields) (paths fields) {
	for _, path := range all {
		paths = append(paths, prefix+path)
	}
	return paths
}

// cover reports whether a struct has values in these fields only.
func (f fields) cover(value any) bool { return f.covers("", reflect.Indirect(reflect.ValueOf(value))) }

func (f fields) covers(path string, value reflect.Value) bool {
	if value.IsZero() {
		return true
	}
	inside := false
	for _, known := range f {
		if known == path {
			return true
		}
		inside = inside || path == "" || strings.HasPrefix(known, path+".")
	}
	if !inside {
		return false
	}
	switch value.Kind() {
	case reflect.Pointer:
		return f.covers(path, value.Elem())
	case reflect.Slice:
		for i := range value.Len() {
			if !f.covers(path, value.Index(i)) {
				return false
			}
		}
		return true
	case reflect.Struct:
		for field, content := range value.Fields() {
			if !f.covers(strings.TrimPrefix(path+"."+field.Name, "."), content) {
				return false
			}
		}
		return true
	default:
		return false
	}
}
