package contender

import (
	"fmt"
	"os/exec"
)

// Engine is what runs containers below both runtimes: minicri's handler of that
// name, and containerd's. The zero Engine is what each has by itself.
type Engine struct {
	Name   string
	path   string
	binary string // of containerd's runc shim, "" for runc
}

// FindEngine finds a runtime in PATH: runc or crun.
func FindEngine(name string) (Engine, error) {
	e := Engine{Name: name}
	switch name {
	case "":
		return Engine{}, nil
	case "runc":
	case "crun":
		e.binary = name
	default:
		return Engine{}, fmt.Errorf("runtime %q is neither runc nor crun", name)
	}
	path, err := exec.LookPath(name)
	e.path = path
	return e, err
}

func (e Engine) minicri() string {
	if e.Name == "" {
		return ""
	}
	return fmt.Sprintf("[runtimes.%s]\ntype = \"oci\"\npath = %q\n", e.Name, e.path)
}

func (e Engine) containerd() string {
	if e.Name == "" {
		return ""
	}
	// The default runtime, runc, is none where another table is given.
	table := fmt.Sprintf("  [plugins.\"io.containerd.grpc.v1.cri\".containerd]\n    default_runtime_name = %q\n", e.Name)
	table += fmt.Sprintf("  [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.%s]\n", e.Name)
	config := table + "    runtime_type = \"io.containerd.runc.v2\"\n"
	if e.binary == "" {
		return config
	}
	return config + fmt.Sprintf("    [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.%s.options]\n      BinaryName = %q\n", e.Name, e.path)
}
