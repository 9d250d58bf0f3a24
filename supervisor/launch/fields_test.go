package launch

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/minicri/minicri/test/harness"
)

// A launch implements or refuses each field of the runtime-spec, also one that a new version adds.
//
// attack: denial of service: a spec has any field of the runtime-spec that a direct start does not implement
// held: libcontainer starts the process; no field that restricts a process is ignored
func TestLaunchRefusesWhatItDoesNotImplement(t *testing.T) {
	for _, row := range []struct {
		name        string
		implemented fields
		of          func(s *specs.Spec) any
		can         func(s *specs.Spec) bool
	}{
		{
			"the process of an exec", processFields,
			func(s *specs.Spec) any { return s.Process },
			canExec,
		},
		{
			"the container of an exec", containerFields,
			func(s *specs.Spec) any { return s.Linux },
			canExec,
		},
		{"a pause", pauseFields, func(s *specs.Spec) any { return s }, CanPause},
	} {
		t.Run(row.name, func(t *testing.T) {
			harness.Need(t, row.can(plainSpec()), "a plain one is refused")
			all := leaves(reflect.TypeOf(row.of(plainSpec())).Elem(), "")
			for _, path := range all {
				s := plainSpec()
				set(reflect.ValueOf(row.of(s)).Elem(), strings.Split(path, "."))
				known := slices.ContainsFunc(row.implemented, func(f string) bool {
					return strings.HasPrefix(path+".", f+".")
				})
				// A value can be refused in a field that is implemented.
				harness.Want(t, known || !row.can(s), "%s is ignored", path)
				harness.Want(t, !known || row.implemented.cover(row.of(s)), "%s is implemented, and refused", path)
			}
			for _, f := range row.implemented {
				exists := slices.ContainsFunc(all, func(path string) bool { return strings.HasPrefix(path+".", f+".") })
				harness.Want(t, exists, "the runtime-spec has no field %s any more", f)
			}
		})
	}
}

func canExec(s *specs.Spec) bool {
	s.Process.Env = append(s.Process.Env, "HOME=/")
	return CanExec(s, s.Process)
}

func plainSpec() *specs.Spec {
	return &specs.Spec{
		Root: &specs.Root{Path: "/", Readonly: true},
		Process: &specs.Process{
			Args: []string{"/program"}, NoNewPrivileges: true, Capabilities: &specs.LinuxCapabilities{},
		},
		Linux: &specs.Linux{Namespaces: []specs.LinuxNamespace{{Type: specs.MountNamespace}}},
	}
}

// leaves returns the paths of all fields of a struct that are no structs.
func leaves(of reflect.Type, path string) (paths []string) {
	for of.Kind() == reflect.Pointer || of.Kind() == reflect.Slice {
		of = of.Elem()
	}
	if of.Kind() != reflect.Struct {
		return []string{strings.TrimPrefix(path, ".")}
	}
	for field := range of.Fields() {
		paths = append(paths, leaves(field.Type, path+"."+field.Name)...)
	}
	return paths
}

// set gives the field at a path a value. It adds an element to the slices above it.
func set(in reflect.Value, path []string) {
	switch in.Kind() {
	case reflect.Pointer:
		if in.IsNil() {
			in.Set(reflect.New(in.Type().Elem()))
		}
		set(in.Elem(), path)
	case reflect.Slice:
		in.Set(reflect.Append(in, reflect.Zero(in.Type().Elem())))
		set(in.Index(in.Len()-1), path)
	case reflect.Map:
		in.Set(reflect.MakeMap(in.Type()))
		in.SetMapIndex(reflect.New(in.Type().Key()).Elem(), reflect.New(in.Type().Elem()).Elem())
	case reflect.Struct:
		if len(path) > 0 {
			set(in.FieldByName(path[0]), path[1:])
		}
	case reflect.String:
		in.SetString("value")
	case reflect.Bool:
		in.SetBool(true)
	default:
		in.Set(reflect.ValueOf(1).Convert(in.Type()))
	}
}
