// Package minicri_test checks the source itself: what every package has to say of itself, and who may import whom.
package minicri_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

const module = "github.com/minicri/minicri"

// pkg is a package as go list describes it.
type pkg struct {
	ImportPath string
	Name       string
	Dir        string
	GoFiles    []string
	Imports    []string
	CgoFiles   []string

	TestImports, XTestImports []string

	Module *struct {
		Path, Version string
		Main          bool
	}
}

// allImports are those of the package and of its tests.
func (p pkg) allImports() []string { return slices.Concat(p.Imports, p.TestImports, p.XTestImports) }

// name is the path of the package in this repository: "sandbox".
func (p pkg) name() string { return strings.TrimPrefix(strings.TrimPrefix(p.ImportPath, module), "/") }

// all are the packages of this repository; go list is asked once.
var all = sync.OnceValues(func() ([]pkg, error) { return list(".", "./...") })

func everyPackage(t *testing.T) []pkg {
	packages, err := all()
	must(t, err)
	return packages
}

func list(dir string, arguments ...string) (packages []pkg, err error) {
	command := exec.Command("go", append([]string{"list", "-json", "-tags", "seccomp,nri_no_wasm"}, arguments...)...)
	command.Dir = dir
	out, err := command.Output()
	if err != nil {
		return nil, fmt.Errorf("%v: %w", command, err)
	}
	for decoder := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
			return packages, nil
		} else if err != nil {
			return nil, err
		}
		packages = append(packages, p)
	}
}

// layers are the packages of the daemon from the top down. A package imports those of the layers below its own, so
// a reader who goes down never has to come up again, and a change has its effects above and nowhere else.
var layers = [][]string{
	{"cmd/minicri"},
	{"server"},
	{"internal/doctor", "internal/inspect", "internal/metrics", "nri"},
	{"container", "sandbox", "image", "stream", "stats"},
	{"internal/object"},
	{"internal/sweep", "internal/validate"},
	{"network", "oci", "supervisor/client"},
	{"namespace", "network/runner"},
	{"internal/timeline"},
	{"internal/node", "internal/step"},
	{"internal/cgroup", "internal/containerd", "internal/handler", "internal/manual", "internal/trace", "supervisor/pipe"},
	{"stream/spdy", "supervisor/api", "internal/machine", "oci/pause", "internal/config", "internal/errtext", "internal/redact", "internal/socket", "internal/state", "internal/trace/otlp"},
	{"internal/process", "internal/step/failpoint", "internal/tree"},
}

func layerOf(name string) int {
	return slices.IndexFunc(layers, func(layer []string) bool { return slices.Contains(layer, name) })
}

// besides are edges inside a layer, each with its reason.
var besides = map[string]string{
	"container -> sandbox": "a container lives in a pod, and needs its namespaces and files",
	"container -> image":   "a container's rootfs is made of an image",
	"stats -> image":       "the numbers of the image file system",
	"stream -> container":  "exec and attach go to a container",
	"stream -> sandbox":    "port-forward goes to a pod",
}

func TestImportsPointDown(t *testing.T) {
	used := make(map[string]bool)
	for _, name := range slices.Concat(layers...) { // what is not there would hold nothing
		harness.Want(t, slices.ContainsFunc(everyPackage(t), func(p pkg) bool { return p.name() == name }),
			"the layers name %s, which is no package", name)
	}
	for _, p := range everyPackage(t) {
		from := layerOf(p.name())
		if from < 0 {
			continue // not of the daemon: the shim's side, and tests
		}
		for _, imported := range p.Imports {
			to, ours := strings.CutPrefix(imported, module+"/")
			if !ours {
				continue
			}
			below := layerOf(to)
			edge := p.name() + " -> " + to
			used[edge] = true
			switch _, known := besides[edge]; {
			case below < 0:
				t.Errorf("%s imports %s, which is no package of the daemon", p.name(), to)
			case below < from:
				t.Errorf("%s imports %s, which stands above it", p.name(), to)
			case below == from && !known:
				t.Errorf("%s imports %s, which stands beside it", p.name(), to)
			}
		}
	}
	for edge := range besides {
		harness.Want(t, used[edge], "the exception %q is used by nothing: remove it", edge)
	}
}

// reserved are the imports that few packages may have. A name ends with "/..." for all packages below it.
var reserved = []struct {
	imports string
	only    []string
	why     string
}{
	{
		"k8s.io/cri-api/...",
		[]string{"cmd/minicri", "server", "internal/inspect", "internal/metrics", "sandbox", "container", "internal/validate", "oci", "nri", "stats", "stream", "hack/cluster", "hack/cri", "hack/demo", "test/..."},
		"the CRI is the surface: what is below it has words of its own, and can be read without knowing Kubernetes",
	},
	{
		"google.golang.org/grpc/...",
		[]string{"cmd/minicri", "server", "supervisor/client", "supervisor/serve", "internal/trace/otlp", "hack/cluster", "hack/demo", "test/..."},
		"errors have domain kinds inside; their codes are given at the edges: in server, and where ttrpc begins and ends",
	},
	{
		"github.com/opencontainers/runc/...",
		[]string{"supervisor/engine", "supervisor/launch", "cmd/minicri-shim"},
		"libcontainer is cgo and re-executes its own binary: it must never be in the daemon",
	},
	{
		"github.com/containerd/containerd/v2/...",
		[]string{"image"},
		"its libraries are large; what they are used for is behind one package",
	},
	{
		"github.com/containerd/go-cni/...",
		[]string{"network"},
		"every run of a plugin has a limit and is found again after a crash, because there is one place that runs them",
	},
	{
		"github.com/containerd/nri/...",
		[]string{"nri", "test/container"},
		"pods and containers know plugins by two interfaces, and nothing of NRI's messages",
	},
	{"github.com/containernetworking/...", []string{"network", "network/runner", "test/bench/..."}, "as with go-cni"},
	{
		module + "/test/...",
		[]string{"hack/...", "test/..."},
		"the product is tested as it is: no package of it has code for tests",
	},
}

func TestReservedImports(t *testing.T) {
	for _, rule := range reserved {
		used := make(map[string]bool)
		for _, p := range everyPackage(t) {
			if !slices.ContainsFunc(p.allImports(), func(imported string) bool { return matches(rule.imports, imported) }) {
				continue
			}
			i := slices.IndexFunc(rule.only, func(pattern string) bool { return matches(pattern, p.name()) })
			if i >= 0 {
				used[rule.only[i]] = true
			} else if slices.ContainsFunc(p.Imports, func(imported string) bool { return matches(rule.imports, imported) }) {
				t.Errorf("%s imports %s, which is for %q only: %s", p.ImportPath, rule.imports, rule.only, rule.why)
			}
		}
		for _, pattern := range rule.only {
			harness.Want(t, used[pattern], "%s may import %s, but does not: remove the exception", pattern, rule.imports)
		}
	}
}

func matches(pattern, name string) bool {
	prefix, all := strings.CutSuffix(pattern, "/...")
	return name == prefix || all && strings.HasPrefix(name, prefix+"/")
}

// programs lists what must not be linked into a program, by whatever way.
var programs = []struct {
	program string
	without []string
	why     string
}{
	{
		"./cmd/minicri",
		[]string{"github.com/opencontainers/runc/...", "runtime/cgo", "C"},
		"the daemon is pure Go: it runs on any machine, and no C code forks in it",
	},
	{
		"./cmd/minicri-shim",
		[]string{
			"google.golang.org/grpc", "google.golang.org/grpc/internal/transport", "k8s.io/...", "github.com/containerd/containerd/v2/...", "github.com/containerd/go-cni/...",
			"github.com/containernetworking/...", "net/http", module + "/server", module + "/sandbox", module + "/network", module + "/internal/config",
		},
		"libcontainer re-executes this binary for every start of a container, and supervisors keep it in memory: its size is paid again and again",
	},
}

func TestWhatProgramsAreMadeOf(t *testing.T) {
	for _, rule := range programs {
		t.Setenv("CGO_ENABLED", map[bool]string{true: "0", false: "1"}[rule.program == "./cmd/minicri"])
		packages, err := list(".", "-deps", rule.program)
		must(t, err)
		for _, p := range packages {
			for _, pattern := range rule.without {
				harness.Want(t, !matches(pattern, p.ImportPath), "%s is made of %s, too: %s", rule.program, p.ImportPath, rule.why)
			}
		}
	}
}

func must(t testing.TB, err error) { t.Helper(); harness.Check(t, err) }
