// Package nodetest makes nodes for end-to-end tests: the real daemon with real CNI plugins, in a network
// namespace, directories and cgroups of its own.
//
//	n := nodetest.New(t, nodetest.PortMap())
//	id := n.RunPod(n.PodConfig("web", nodetest.HostPort(8080, 80)))
//	n.Kill()
//	n.Start()
//	status, err := n.Runtime.PodSandboxStatus(ctx, ...)
//
// When the test ends, every pod that is left is stopped and removed, and the node has to hold what it held
// when it was idle before the first one. Then the daemon is stopped, and the machine has to hold what it held
// before the node was made. What differs fails the test, each thing by its name. Then it is taken away by
// force, so that the next test starts clean.
//
// A node's life: made and started (New), any number of Kill, Stop, Start and Restart, closed by the
// test's end in whatever state it is. A Node belongs to its test's goroutine; Runtime, Image and RunInNetns
// may be used from others, but not during Start.
//
// Leaks are looked for in all processes that are in sight. So tests with nodes do not run in parallel, unless
// they have the option [Parallel], and they run under hack/in-netns, where no other work of the machine is in
// sight. Nothing is skipped: without root or without the binaries a test fails.
package nodetest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/leak"
)

// Node is one daemon and what it works with. The directories exist from the beginning, and are removed when
// the test ends.
type Node struct {
	Dir     string // holds all the directories below
	Root    string // --root
	State   string // --state
	Netns   string // --netns-dir
	CNIConf string // --cni-conf-dir
	CNIBin  string // --cni-bin-dir, after Plugins
	Plugins string // --cni-bin-dir, empty: for plugins of the test
	Logs    string // where PodConfig puts log directories
	Socket  string // --socket

	Network      string // name of the CNI network
	Bridge       string // its bridge, at most 15 characters
	Addresses    string // host-local's directory: a file for each address that is out
	CgroupParent string // below the root of each hierarchy

	// Runtime and Image are clients of the daemon. Start replaces them.
	Runtime runtimeapi.RuntimeServiceClient
	Image   runtimeapi.ImageServiceClient

	t        testing.TB
	options  options
	binaries string // directory of minicri and minicri-shim
	netns    *os.File
	daemon   *child // nil before the first start
	hangUp   func() // closes the clients' connection

	podCgroups []string // of MakeCgroup

	empty leak.Snapshot // before the daemon's first start
	idle  leak.Snapshot // after it, before any pod
}

// New makes a node and starts its daemon, and checks it when the test ends. It fails the test when that
// is not possible, and panics in a parallel test unless the option [Parallel] makes it one.
func New(t testing.TB, opts ...Option) *Node {
	runBesideOthers(t, opts)
	binaries := BinDir(t)
	harness.Check(t, checkRequirements(binaries))
	n := prepare(t, binaries, opts)
	t.Cleanup(n.close)
	n.empty = n.look(n.machineScope())
	n.Start()
	// What it tries at its start, a pause and a container of each handler, is no part of an idle node; on a busy
	// machine it serves before they are gone.
	trying := regexp.MustCompile("is not known yet|has not yet made")
	harness.Eventually(t, "the daemon knows whether pods can be made", func() bool {
		return !trying.MatchString(Call(t, n.Runtime.Status, &runtimeapi.StatusRequest{}).String())
	})
	n.idle = n.look(n.idleScope())
	return n
}

func runBesideOthers(t testing.TB, opts []Option) {
	var o options
	for _, option := range opts {
		option(&o)
	}
	if test, ok := t.(*testing.T); o.parallel && ok {
		test.Parallel()
		return
	}
	t.Setenv("MINICRI_TEST", "1") // panics in a parallel test, which would see the pods of others as leaks
}

// prepare makes all that a daemon needs to start.
func prepare(t testing.TB, binaries string, opts []Option) *Node {
	// Not t.TempDir: a socket's path has to be short, see unix(7).
	dir, err := os.MkdirTemp("", "mcr")
	if err == nil {
		err = os.Chmod(dir, 0o711) // processes of user namespaces have to get through
	}
	harness.Check(t, err)
	unique := filepath.Base(dir)
	n := &Node{
		Dir: dir, Network: unique, Bridge: unique, Root: filepath.Join(dir, "root"), State: filepath.Join(dir, "state"),
		Netns: filepath.Join(dir, "netns"), CNIConf: filepath.Join(dir, "net.d"), CNIBin: filepath.Join(binaries, "cni"),
		Plugins: filepath.Join(dir, "plugins"), Logs: filepath.Join(dir, "logs"), Socket: filepath.Join(dir, "cri.sock"),
		Addresses: filepath.Join(dir, "addresses", unique), CgroupParent: cgroupParent(unique), t: t, binaries: binaries,
		hangUp: func() {},
	}
	t.Cleanup(n.removeAll)
	for _, option := range append([]Option{testedRuntime()}, opts...) {
		option(&n.options)
	}
	if from := n.options.binaries; from != "" {
		n.must("looking for binaries", checkRequirements(from))
		n.binaries, n.CNIBin = from, filepath.Join(from, "cni")
	}
	for _, dir := range []string{n.Root, n.State, n.Netns, n.CNIConf, n.Plugins, n.Logs} {
		n.must("making a directory", os.Mkdir(dir, 0o755))
	}
	n.makeNetns()
	n.makeCgroups()
	n.configure()
	return n
}

func (n *Node) must(what string, err error) {
	n.t.Helper()
	if err != nil {
		n.t.Fatalf("node %s: %s: %v%s", n.Network, what, err, harness.Callers())
	}
}

// BinDir is MINICRI_BIN, or bin of the repository.
func BinDir(t testing.TB) string {
	t.Helper()
	if dir := os.Getenv("MINICRI_BIN"); dir != "" {
		return dir
	}
	dir, err := os.Getwd()
	harness.Check(t, err)
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return filepath.Join(dir, "bin")
		}
		if dir == "/" {
			t.Fatal("no go.mod above the working directory: set MINICRI_BIN to the directory of the binaries")
		}
		dir = filepath.Dir(dir)
	}
}

func checkRequirements(binaries string) error {
	if os.Getuid() != 0 {
		return errors.New("tests with pods need root: they make real namespaces, mounts, links and cgroups")
	}
	for _, name := range []string{"minicri", "minicri-shim", "cni/bridge", "cni/host-local", "cni/portmap"} {
		if _, err := os.Stat(filepath.Join(binaries, name)); err != nil {
			return fmt.Errorf("a binary is absent, run 'make setup build': %w", err)
		}
	}
	return nil
}

// Option changes how a node is made.
type Option func(*options)

type options struct {
	dualStack, portMap, noNetwork, parallel bool

	levelOfFile      bool // the configuration file has the log level
	config, binaries string
	env, flags       []string
	// handler is that of RunPod; runtimes are tables that come last in the file.
	handler, runtimes string
}

// Runtime adds a runtime handler of that name, an OCI runtime with runc's command line, which RunPod uses from then on.
func Runtime(handler, path string) Option {
	return func(o *options) {
		o.handler = handler
		o.runtimes += fmt.Sprintf("[runtimes.%s]\ntype = 'oci'\npath = '%s'\n", handler, path)
		if filepath.Base(path) == "runsc" { // docs/runtimes.md says why
			o.runtimes += "args = ['--platform=ptrace', '--network=host']\nsandbox_per_container = true\n"
		}
	}
}

// testedRuntime is the OCI runtime that all tests of a run use, by the environment variable
// MINICRI_TEST_RUNTIME; libcontainer without it.
func testedRuntime() Option {
	return func(o *options) {
		if path := os.Getenv("MINICRI_TEST_RUNTIME"); path != "" {
			Runtime("tested", path)(o)
		}
	}
}

// DualStack gives pods an IPv6 address beside the IPv4 one.
func DualStack() Option { return func(o *options) { o.dualStack = true } }

// PortMap adds the portmap plugin, so that pods may have host ports.
func PortMap() Option { return func(o *options) { o.portMap = true } }

// NoNetwork leaves the directory of CNI configurations empty.
func NoNetwork() Option { return func(o *options) { o.noNetwork = true } }

// Parallel lets the test run beside others that have this option too. Leaks of processes are then looked for
// among those that carry the node's name, and those of namespaces only by [Main], when all tests have ended.
func Parallel() Option { return func(o *options) { o.parallel = true } }

// Alone undoes Parallel.
func Alone() Option { return func(o *options) { o.parallel = false } }

// Config adds TOML to the daemon's configuration file: keys, then tables. cgroup_driver and cgroup_parent are
// there already.
func Config(toml string) Option { return func(o *options) { o.config += toml + "\n" } }

// LevelOfFile leaves the log level to the configuration file. Without it a flag says debug.
func LevelOfFile() Option { return func(o *options) { o.levelOfFile = true } }

// Env adds KEY=VALUE pairs to the daemon's environment.
func Env(pairs ...string) Option { return func(o *options) { o.env = append(o.env, pairs...) } }

// Binaries takes minicri, its shim and the plugins from another directory.
func Binaries(dir string) Option { return func(o *options) { o.binaries = dir } }

// Flags adds arguments to the daemon's command line.
func Flags(flags ...string) Option { return func(o *options) { o.flags = append(o.flags, flags...) } }
