package harness

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/leak"
)

// Node is one daemon and what it works with. The directories exist from the
// beginning, and are removed when the test ends.
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

	cgroups    []*os.File // its cgroups, one of each hierarchy: the locks of their owner
	podCgroups []string   // of MakeCgroup

	empty leak.Snapshot // before the daemon's first start
	idle  leak.Snapshot // after it, before any pod
}

// NewNode makes a node and starts its daemon, and checks it when the test ends.
// It fails the test when that is not possible, and panics in a parallel test
// unless the option [Parallel] makes it one.
func NewNode(t testing.TB, opts ...Option) *Node {
	t.Helper()
	return NewNodes(t, 1, opts...)[0]
}

// NewNodes makes several nodes for one test. They are checked together: the
// processes of one are in sight of the others.
func NewNodes(t testing.TB, count int, opts ...Option) []*Node {
	t.Helper()
	runBesideOthers(t, opts)
	binaries := BinDir(t)
	if err := checkRequirements(os.Getuid(), binaries); err != nil {
		t.Fatal(err)
	}
	nodes := make([]*Node, count)
	for i := range nodes {
		nodes[i] = prepare(t, binaries, opts)
	}
	t.Cleanup(func() { closeNodes(t, nodes) })
	for _, n := range nodes {
		n.empty = n.look(n.machineScope())
	}
	for _, n := range nodes {
		n.Start()
		n.idle = n.look(n.idleScope())
	}
	return nodes
}

func runBesideOthers(t testing.TB, opts []Option) {
	var o options
	for _, option := range opts {
		option(&o)
	}
	test, ok := t.(*testing.T)
	switch {
	case o.parallel && ok:
		test.Parallel()
	default:
		t.Setenv("MINICRI_TEST", "1") // panics in a parallel test, which would see the pods of others as leaks
	}
}

// prepare makes all that a daemon needs to start.
func prepare(t testing.TB, binaries string, opts []Option) *Node {
	t.Helper()
	// Not t.TempDir: a socket's path has to be short, see unix(7).
	dir, err := os.MkdirTemp("", "mcr")
	if err == nil {
		err = os.Chmod(dir, 0o711) // processes of user namespaces have to get through
	}
	if err != nil {
		t.Fatal(err)
	}
	unique := filepath.Base(dir)
	n := &Node{
		Dir:     dir,
		Root:    filepath.Join(dir, "root"),
		State:   filepath.Join(dir, "state"),
		Netns:   filepath.Join(dir, "netns"),
		CNIConf: filepath.Join(dir, "net.d"),
		CNIBin:  filepath.Join(binaries, "cni"),
		Plugins: filepath.Join(dir, "plugins"),
		Logs:    filepath.Join(dir, "logs"),
		Socket:  filepath.Join(dir, "cri.sock"),

		Network:      unique,
		Bridge:       unique,
		Addresses:    filepath.Join(dir, "addresses", unique),
		CgroupParent: cgroupParent(unique),

		t:        t,
		binaries: binaries,
		hangUp:   func() {},
	}
	t.Cleanup(n.removeAll)
	for _, option := range append([]Option{testedRuntime()}, opts...) {
		option(&n.options)
	}
	n.useBinaries(n.options.binaries)
	n.makeDirectories()
	n.makeNetns()
	n.makeCgroups()
	n.configure()
	return n
}

func (n *Node) useBinaries(dir string) {
	n.t.Helper()
	if dir == "" {
		return
	}
	n.must("looking for binaries", checkRequirements(os.Getuid(), dir))
	n.binaries, n.CNIBin = dir, filepath.Join(dir, "cni")
}

func (n *Node) makeDirectories() {
	n.t.Helper()
	for _, dir := range []string{n.Root, n.State, n.Netns, n.CNIConf, n.Plugins, n.Logs} {
		n.must("making a directory", os.Mkdir(dir, 0o755))
	}
}

func (n *Node) must(what string, err error) {
	n.t.Helper()
	if err != nil {
		n.t.Fatalf("node %s: %s: %v", n.Network, what, err)
	}
}

// BinDir is MINICRI_BIN, or bin of the repository.
func BinDir(t testing.TB) string {
	t.Helper()
	if dir := os.Getenv("MINICRI_BIN"); dir != "" {
		return dir
	}
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
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

func checkRequirements(uid int, binaries string) error {
	if uid != 0 {
		return fmt.Errorf("tests with pods need root: they make real namespaces, mounts, links and cgroups")
	}
	for _, name := range []string{"minicri", "minicri-shim", "cni/bridge", "cni/host-local", "cni/portmap"} {
		if _, err := os.Stat(filepath.Join(binaries, name)); err != nil {
			return fmt.Errorf("a binary is absent, run 'make setup build': %w", err)
		}
	}
	return nil
}
