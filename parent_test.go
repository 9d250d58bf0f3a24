package minicri_test

import (
	"cmp"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

// The supervisor is only a parent: these are its packages, and those that speak to it.
var parents = []string{"supervisor/api", "supervisor/client", "supervisor/launch", "supervisor/starter", "supervisor/stdio", "supervisor/serve"}

// mayFork are the calls with which the supervisor, or who speaks to it, makes
// processes, by package, each with why no container can hold it up.
var mayFork = map[string]string{
	"supervisor/client exec.Command":      "the daemon starts supervisors",
	"supervisor/starter syscall.ForkExec": "starters, in the supervisor's own namespaces and cgroup",
	"supervisor/launch syscall.ForkExec":  "launchers, in the supervisor's own namespaces and cgroup: they clone, after they have joined the container's",
	"supervisor/launch unix.SYS_CLONE":    "a call of a launcher's list, not of the supervisor",
	"supervisor/launch unix.SYS_CLONE3":   "the same",
	"supervisor/launch unix.SYS_SETNS":    "the same",
	"supervisor/launch unix.Unshare":      "a thread of the supervisor makes the mount namespace that pauses copy, where nobody is",
}

// forks are what makes a process, enters a namespace or is born in a cgroup.
var forks = []string{
	"exec.Command", "exec.CommandContext", "exec.Cmd", "os.StartProcess", "syscall.ForkExec", "syscall.StartProcess",
	"SYS_CLONE", "SYS_CLONE3", "SYS_FORK", "SYS_VFORK", "SYS_SETNS", "SYS_UNSHARE", "unix.Setns", "unix.Unshare", "syscall.Unshare",
	"Cloneflags", "Unshareflags", "UseCgroupFD", "CgroupFD", "Chroot", "Ptrace", "UidMappings", "GidMappings",
}

// inParents calls do for each package of the supervisor and each of ours that these are made of.
func inParents(t *testing.T, do func(of string, p pkg)) {
	t.Helper()
	t.Setenv("CGO_ENABLED", "1")
	seen := make(map[string]bool)
	for _, name := range parents {
		if !slices.ContainsFunc(everyPackage(t), func(p pkg) bool { return p.name() == name }) {
			t.Errorf("there is no package %s", name)
			continue
		}
		packages, err := list(".", "-deps", "./"+name)
		must(t, err)
		for _, p := range packages {
			if !seen[p.ImportPath] {
				do(name, p)
			}
			seen[p.ImportPath] = true
		}
	}
}

// libcontainer makes processes in cgroups and namespaces of containers, waits for them
// and reads what they write: that is for a starter.
func TestTheSupervisorHasNoLibcontainer(t *testing.T) {
	inParents(t, func(of string, p pkg) {
		harness.Want(t, !matches("github.com/opencontainers/runc/...", p.ImportPath), "%s is made of %s", of, p.ImportPath)
	})
}

// A fork by the supervisor shares its memory until the child has executed its program, and holds the thread that
// made it: a container that can reach such a child holds the supervisor of all pods.
func TestTheSupervisorForksWhereNoContainerIs(t *testing.T) {
	used := make(map[string]bool)
	inParents(t, func(_ string, p pkg) {
		if !strings.HasPrefix(p.ImportPath, module+"/") {
			return
		}
		for _, file := range slices.Concat(p.GoFiles, p.CgoFiles) {
			for _, call := range forksIn(t, filepath.Join(p.Dir, file)) {
				key := p.name() + " " + call
				used[key] = true
				harness.Want(t, mayFork[key] != "", "%s/%s has %s: who says that no container is there?", p.name(), file, call)
			}
		}
	})
	for _, key := range slices.Sorted(maps.Keys(mayFork)) {
		harness.Want(t, used[key], "%s is allowed and is not there: remove the exception", key)
	}
}

// forksIn are the names of forks that a file uses: alone, as fields are, or with their package, whatever that
// is called in the file; and system calls that have a number and no name.
func forksIn(t *testing.T, file string) (found []string) {
	parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
	must(t, err)
	renamed := make(map[string]string)
	for _, i := range parsed.Imports {
		if i.Name != nil {
			renamed[i.Name.Name] = path.Base(strings.Trim(i.Path.Value, `"`))
		}
	}
	ast.Inspect(parsed, func(node ast.Node) bool {
		switch n := node.(type) {
		case *ast.CallExpr:
			called, _ := n.Fun.(*ast.SelectorExpr)
			if called == nil || !strings.Contains(called.Sel.Name, "Syscall") || len(n.Args) == 0 {
				break
			}
			if number, is := n.Args[0].(*ast.BasicLit); is && number.Kind == token.INT {
				found = append(found, "system call "+number.Value)
			}
		case *ast.SelectorExpr:
			from, _ := n.X.(*ast.Ident)
			whole := n.Sel.Name
			if from != nil {
				whole = cmp.Or(renamed[from.Name], from.Name) + "." + whole
			}
			if slices.Contains(forks, whole) || slices.Contains(forks, n.Sel.Name) {
				found = append(found, whole)
			}
		case *ast.KeyValueExpr:
			if key, is := n.Key.(*ast.Ident); is && slices.Contains(forks, key.Name) {
				found = append(found, key.Name)
			}
		}
		return true
	})
	slices.Sort(found)
	return slices.Compact(found)
}
