package minicri_test

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

// The supervisor is only a parent: these are its packages, and those that speak to it.
var parents = []string{"supervisor/api", "supervisor/bundle", "supervisor/client", "supervisor/launch", "supervisor/starter", "supervisor/stdio", "supervisor/serve"}

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

var update = flag.Bool("update", false, "write docs/security.md anew")

// attack is what a test says of itself in its comment.
type attack struct{ subject, tried, held, field, test string }

// TestSecurityPageIsCurrent holds docs/security.md to the tests: what was tried
// and how it ended stands beside the code that tries it.
func TestSecurityPageIsCurrent(t *testing.T) {
	const page = "docs/security.md"
	attacks := findAttacks(t)
	harness.Need(t, len(attacks) >= 20, "only %d attacks found", len(attacks))
	want := securityPage(t, attacks)
	if *update {
		must(t, os.WriteFile(page, []byte(want), 0o644))
	}
	got, err := os.ReadFile(page)
	harness.Want(t, err == nil && string(got) == want, "%s is not what the tests say (%v): run make generate", page, err)
}

func findAttacks(t *testing.T) (attacks []attack) {
	for _, p := range everyPackage(t) {
		for _, file := range harness.Glob(t, p.Dir, "*_test.go") {
			attacks = append(attacks, attacksIn(t, p.name(), file)...)
		}
	}
	return attacks
}

func attacksIn(t *testing.T, directory, file string) (attacks []attack) {
	parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ParseComments)
	must(t, err)
	for _, declaration := range parsed.Decls {
		function, ok := declaration.(*ast.FuncDecl)
		if !ok || function.Doc == nil || !strings.HasPrefix(function.Name.Name, "Test") {
			continue
		}
		one := attack{test: directory + " " + function.Name.Name}
		// Not Doc.Text: it takes "attack:images" for a directive.
		for _, comment := range function.Doc.List {
			key, text, _ := strings.Cut(strings.TrimPrefix(comment.Text, "// "), ": ")
			switch key {
			case "attack":
				one.subject, one.tried, _ = strings.Cut(text, ": ")
			case "held":
				one.held = text
			case "field":
				one.field = text
			}
		}
		harness.Want(t, one.tried == "" || one.held != "", "%s says what is tried, and not how it ends", one.test)
		if one.tried != "" {
			attacks = append(attacks, one)
		}
	}
	return attacks
}

func securityPage(t *testing.T, attacks []attack) string {
	var page strings.Builder
	page.WriteString(`# Attacks that were tried

<!-- Generated by "make generate" from the comments of the tests. -->

Each row is an attack that a test runs, most of them on the real daemon, kernel and registries. SECURITY.md
has the threat model and the promises.
`)
	slices.SortStableFunc(attacks, func(a, b attack) int { return strings.Compare(a.subject+a.test, b.subject+b.test) })
	subject := ""
	for _, a := range attacks {
		if a.subject != subject {
			subject = a.subject
			fmt.Fprintf(&page, "\n## %s%s\n\n| attack | result | other runtimes |\n| --- | --- | --- |\n",
				strings.ToUpper(subject[:1]), subject[1:])
		}
		fmt.Fprintf(&page, "| %s | %s | %s |\n", a.tried, a.held, a.field)
	}
	version, files := mirrored(t)
	fmt.Fprintf(&page, `
## Direct starts

Pauses and most execs start without libcontainer. The code below supervisor/launch repeats these files of
runc %s (module sum %s). A release is made only with this version. A field of the runtime-spec that this
code does not implement is refused, and libcontainer starts the process.

| runc | supervisor/launch |
| --- | --- |
`, version[0], version[1])
	for _, f := range files {
		fmt.Fprintf(&page, "| %s | %s |\n", f[1], f[2])
	}
	return page.String()
}

// mirrored reads supervisor/launch/runc.txt.
func mirrored(t *testing.T) (version []string, files [][]string) {
	for line := range strings.Lines(string(harness.Read(t, "supervisor/launch/runc.txt"))) {
		switch words := strings.Fields(line); {
		case words[0] == "version":
			version = words[1:]
		case words[0] != "#":
			files = append(files, words)
		}
	}
	return version, files
}

// The files of runc that direct starts repeat are those that somebody has read.
func TestMirroredFilesOfRunc(t *testing.T) {
	modules, err := exec.Command("go", "list", "-m", "-f", "{{.Version}} {{.Dir}}", "github.com/opencontainers/runc").Output()
	must(t, err)
	now, dir, _ := strings.Cut(strings.TrimSpace(string(modules)), " ")
	version, files := mirrored(t)
	harness.Same(t, "the version of runc in supervisor/launch/runc.txt", version[0], now)
	sum := fmt.Sprintf("github.com/opencontainers/runc %s %s\n", version[0], version[1])
	harness.Want(t, strings.Contains(string(harness.Read(t, "go.sum")), sum), "go.sum has another sum of runc than %s", sum)
	for _, f := range files {
		same := fmt.Sprintf("%x", sha256.Sum256(harness.Read(t, filepath.Join(dir, f[1])))) == f[0]
		harness.Want(t, same, "runc's %s has changed: see supervisor/launch/runc.txt", f[1])
		harness.Read(t, filepath.Join("supervisor/launch", f[2]))
	}
}

// Who adds a key or a metric has its line in the page, too.
func TestGeneratedPagesAreCurrent(t *testing.T) {
	for _, page := range []string{"configuration", "metrics"} {
		want, err := exec.Command("go", "run", "./hack/manual", page).Output()
		must(t, err)
		got := harness.Read(t, "docs/"+page+".md")
		harness.Want(t, string(got) == string(want), "docs/%s.md is not what the source says: run make generate", page)
	}
}

// NOTICE names the modules that are linked into what make install installs, at
// their versions; hack/notice, which is slower, finds their licences.
func TestNoticeIsCurrent(t *testing.T) {
	want := slices.Concat(
		linked(t, "0", ".", "-tags", "grpcnotrace,nri_no_wasm", "./cmd/minicri"),
		linked(t, "1", ".", "-tags", "seccomp,runc_nocriu", "./cmd/minicri-shim"),
		linked(t, "0", "hack/plugins", "tool"))
	slices.Sort(want)
	want = slices.Compact(want)
	notice := harness.Read(t, "NOTICE")
	list, _, _ := strings.Cut(string(notice), "\n====")
	var got []string
	for _, line := range regexp.MustCompile(`(?m)^(\S+ v\S+): `).FindAllStringSubmatch(list, -1) {
		got = append(got, line[1])
	}
	slices.Sort(got)
	for _, module := range want {
		harness.Want(t, slices.Contains(got, module), "NOTICE does not name %s: run make generate", module)
	}
	for _, module := range got {
		harness.Want(t, slices.Contains(want, module), "NOTICE names %s, which no program has: run make generate", module)
	}
}

// linked are the modules of a program's packages: "path version".
func linked(t *testing.T, cgo, dir string, arguments ...string) (modules []string) {
	t.Setenv("CGO_ENABLED", cgo)
	t.Setenv("GOARCH", "amd64")
	packages, err := list(dir, append([]string{"-deps"}, arguments...)...)
	must(t, err)
	for _, p := range packages {
		if p.Module != nil && !p.Module.Main {
			modules = append(modules, p.Module.Path+" "+p.Module.Version)
		}
	}
	return modules
}

// The helper programs in C are the same bytes wherever, whenever and in whatever
// locale they are built: what is installed can be compared with what the source makes.
func TestHelperProgramsAreReproducible(t *testing.T) {
	scripts, err := exec.Command("git", "ls-files", "*/build.sh").Output()
	must(t, err)
	built := 0
	for _, script := range strings.Fields(string(scripts)) {
		source := harness.Read(t, script)
		if !strings.Contains(string(source), ".elf") {
			continue
		}
		first := buildIn(t, filepath.Join(t.TempDir(), "a"), filepath.Dir(script), "LANG=C", "TZ=UTC")
		second := buildIn(t, filepath.Join(t.TempDir(), "another", "directory"), filepath.Dir(script), "LANG=de_DE.UTF-8", "TZ=Asia/Tokyo", "CFLAGS=-O0 -g", "LDFLAGS=-g")
		harness.Want(t, bytes.Equal(first, second), "%s makes %d bytes and %d other ones", script, len(first), len(second))
		built++
	}
	harness.Want(t, built != 0, "there is no helper program")
}

func buildIn(t *testing.T, dir, source string, environment ...string) []byte {
	must(t, os.CopyFS(dir, os.DirFS(source)))
	for _, elf := range harness.Glob(t, dir, "*.elf") {
		must(t, os.Remove(elf))
	}
	build := exec.Command("sh", filepath.Join(dir, "build.sh"))
	build.Env = append(os.Environ(), environment...)
	out, err := build.CombinedOutput()
	harness.Need(t, err == nil, "%v: %v: %s", build, err, out)
	made, err := filepath.Glob(filepath.Join(dir, "*.elf"))
	harness.Need(t, err == nil && len(made) == 1, "%s makes %v: %v", source, made, err)
	data := harness.Read(t, made[0])
	return data
}
