package harness

import (
	"fmt"
	"os"
	"path/filepath"
)

// Option changes how a node is made.
type Option func(*options)

type options struct {
	dualStack bool
	portMap   bool
	noNetwork bool
	parallel  bool
	config    string
	env       []string
	flags     []string
	// levelOfFile: the configuration file has the log level.
	levelOfFile bool
	binaries    string
	// handler is that of RunPod; runtimes are tables that come last in the file.
	handler, runtimes string
}

// Runtime adds a runtime handler of that name, an OCI runtime with runc's
// command line, which RunPod uses from then on.
func Runtime(handler, path string) Option {
	return func(o *options) {
		o.handler = handler
		o.runtimes += fmt.Sprintf("[runtimes.%s]\ntype = 'oci'\npath = '%s'\n", handler, path)
		if filepath.Base(path) == "runsc" { // docs/runtimes.md says why
			o.runtimes += "args = ['--platform=ptrace', '--network=host']\nsandbox_per_container = true\n"
		}
	}
}

// testedRuntime is the OCI runtime that all tests of a run use, by the
// environment variable MINICRI_TEST_RUNTIME; libcontainer without it.
func testedRuntime() Option {
	return func(o *options) {
		if path := os.Getenv("MINICRI_TEST_RUNTIME"); path != "" {
			Runtime("tested", path)(o)
		}
	}
}

// DualStack gives pods an IPv6 address beside the IPv4 one.
func DualStack() Option {
	return func(o *options) { o.dualStack = true }
}

// PortMap adds the portmap plugin, so that pods may have host ports.
func PortMap() Option {
	return func(o *options) { o.portMap = true }
}

// NoNetwork leaves the directory of CNI configurations empty.
func NoNetwork() Option {
	return func(o *options) { o.noNetwork = true }
}

// Parallel lets the test run beside others that have this option too. Leaks of
// processes are then looked for among those that carry the node's name, and
// those of namespaces only by [Main], when all tests have ended.
func Parallel() Option {
	return func(o *options) { o.parallel = true }
}

// Config adds TOML to the daemon's configuration file: keys, then tables.
// cgroup_driver and cgroup_parent are there already.
func Config(toml string) Option {
	return func(o *options) { o.config += toml + "\n" }
}

// LevelOfFile leaves the log level to the configuration file. Without it a flag
// says debug.
func LevelOfFile() Option {
	return func(o *options) { o.levelOfFile = true }
}

// Env adds KEY=VALUE pairs to the daemon's environment.
func Env(pairs ...string) Option {
	return func(o *options) { o.env = append(o.env, pairs...) }
}

// Binaries takes minicri, its shim and the plugins from another directory.
func Binaries(dir string) Option {
	return func(o *options) { o.binaries = dir }
}

// Flags adds arguments to the daemon's command line.
func Flags(flags ...string) Option {
	return func(o *options) { o.flags = append(o.flags, flags...) }
}
