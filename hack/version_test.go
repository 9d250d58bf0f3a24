package hack

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	kubernetes "k8s.io/apimachinery/pkg/util/version"
)

// A kubelet parses the runtime's version with ParseSemantic; what it cannot
// parse is shown as "minicri://Unknown". Later commits have later versions.
func TestVersionIsSemantic(t *testing.T) {
	tree := newTree(t)
	later := ""
	for _, step := range []struct{ do, want string }{
		{"git init -q . && git add . && git commit -qm one", `0\.1\.0-dev\.1\+[0-9a-f]+`},
		{"echo >> file", `0\.1\.0-dev\.1\+[0-9a-f]+\.dirty`},
		{"git commit -qam two", `0\.1\.0-dev\.2\+[0-9a-f]+`},
		{"git tag v0.1.0", `0\.1\.0`},
		{"echo >> file", `0\.1\.0\+[0-9a-f]+\.dirty`},
		{"git commit -qam three", `0\.1\.1-dev\.1\+[0-9a-f]+`},
		{"echo 0.2.0 > VERSION && git commit -qam four", `0\.2\.0-dev\.4\+[0-9a-f]+`},
		{"rm -r .git", `0\.2\.0`},
		{"git init -q .. && cd .. && git add . && git commit -qm other && git tag v5.0.0 && cd tree", `0\.2\.0`},
	} {
		got := tree.run(t, step.do+"\nhack/version")
		if !regexp.MustCompile("^" + step.want + "$").MatchString(got) {
			t.Errorf("after %q: version %q, want %s", step.do, got, step.want)
		}
		parsed, err := kubernetes.ParseSemantic(got)
		if err != nil {
			t.Errorf("after %q: %v", step.do, err)
			continue
		}
		if later != "" && parsed.LessThan(kubernetes.MustParseSemantic(later)) {
			t.Errorf("after %q: %s is less than %s before", step.do, got, later)
		}
		later = got
	}
}

// The version that the changelog prepares is the one that is built.
func TestChangelogPreparesTheVersion(t *testing.T) {
	version := strings.TrimSpace(read(t, "../VERSION"))
	first := regexp.MustCompile(`(?m)^## ([0-9.]+)`).FindStringSubmatch(read(t, "../CHANGELOG.md"))
	if first == nil || version != first[1] {
		t.Errorf("VERSION is %s, the newest entry of CHANGELOG.md is %v", version, first)
	}
}

// tree is a directory with hack/version in it.
type tree string

func newTree(t *testing.T) tree {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "tree")
	if err := os.MkdirAll(filepath.Join(dir, "hack"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{"hack/version": read(t, "version"), "VERSION": "0.1.0\n", "file": "x"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return tree(dir)
}

func (dir tree) run(t *testing.T, script string) string {
	t.Helper()
	command := exec.Command("sh", "-euc", script)
	command.Dir = string(dir)
	command.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CEILING_DIRECTORIES="+filepath.Dir(filepath.Dir(string(dir))),
		"GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@example", "GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@example")
	command.Stderr = os.Stderr
	out, err := command.Output()
	if err != nil {
		t.Fatalf("%s: %v", script, err)
	}
	return strings.TrimSpace(string(out))
}
