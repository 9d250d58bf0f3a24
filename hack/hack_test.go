// Package hack holds no Go code of its own: these tests check the set-up's
// scripts and lists.
package hack

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	kubernetes "k8s.io/apimachinery/pkg/util/version"
)

func TestEveryPackageSaysWhy(t *testing.T) {
	for _, list := range []string{"packages.txt", "um/guest/packages.txt", "um/guest/apparmor.txt", "um/guest/selinux.txt", "release/packages.txt", "kind/packages.txt", "release/test.txt"} {
		for line := range strings.Lines(read(t, list)) {
			if strings.HasPrefix(line, "#") {
				continue
			}
			if len(strings.Fields(line)) < 3 {
				t.Errorf("%s: %q does not say why", list, strings.TrimSpace(line))
			}
		}
	}
}

// A skip that hack/skips.txt does not list fails the run, and so do a failure and a test that did not end.
func TestReport(t *testing.T) {
	for _, c := range []struct{ name, events, want string }{
		{"pass", `{"Action":"pass","Package":"p","Elapsed":1.5}`, "ok          1.5 s  p\n"},
		{
			"listed skip", `{"Action":"output","Package":"github.com/minicri/minicri/supervisor/launch",` +
				`"Test":"TestExecUnderAppArmor","Output":"    a_test.go:1: no AppArmor\n"}` + "\n" +
				`{"Action":"skip","Package":"github.com/minicri/minicri/supervisor/launch","Test":"TestExecUnderAppArmor"}`,
			"skipped: supervisor/launch TestExecUnderAppArmor: a_test.go:1: no AppArmor\n",
		},
		{"unlisted skip", `{"Action":"skip","Package":"p","Test":"TestX/part"}`, "FAILED: p TestX is skipped"},
		{"failure", `{"Action":"output","Package":"p","Test":"TestX","Output":"it broke\n"}` + "\n" +
			`{"Action":"fail","Package":"p","Test":"TestX"}`, "it broke\n"},
		{"time-out", `{"Action":"output","Package":"p","Test":"TestX","Output":"it waits\n"}` + "\n" +
			`{"Action":"fail","Package":"p"}`, "it waits\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			report := exec.Command("go", "run", "./hack/report")
			report.Dir, report.Stdin = "..", strings.NewReader(c.events)
			out, err := report.Output()
			if !strings.Contains(string(out), c.want) || (err == nil) != (c.name == "pass" || c.name == "listed skip") {
				t.Errorf("report prints %q (%v), want %q", out, err, c.want)
			}
		})
	}
}

// A part that passed on the same tree is left out, one that would end too late is not begun, and each has its line in
// the results.
func TestParts(t *testing.T) {
	tree := newTree(t)
	for name, content := range map[string]string{
		"hack/parts": read(t, "parts"), ".gitignore": "/bin/\n", "test/results/README.md": "",
		"hack/parts.txt": "wiring test 1 0 - it\ngood ci 30 0 - it\nbad ci 30 0 - it\ncold ci 1 9999 absent it\n",
		"hack/test":      "#!/bin/sh\necho skipped: $1\n[ $1 = good ]\n",
	} {
		path := filepath.Join(string(tree), name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o755)); err != nil {
			t.Fatal(err)
		}
	}
	tree.run(t, "git init -q . && git add . && git commit -qm one")
	for _, step := range []struct{ name, do, want string }{
		{"first run", "RECORD=1 JOBS=1 hack/parts good bad", `(?s)good +ok.*bad: skipped: bad\nbad +FAILED.*skipped: good\n.*status 1$`},
		{"recorded", "cat test/results/20*.md", `(?s)\| good \| ok \| \d+ \|.*\| bad \| FAILED \|`},
		{"resumed", "RESUME=1 hack/parts good", `good +ok .*before, on this tree`},
		{"another tree", "echo >> file; RESUME=1 hack/parts good", `good +ok +\d+ s\s+skipped`},
		{"no time", "BUDGET=10 hack/parts good", `good +not begun .* it takes about 30 s`},
		{"time", "BUDGET=100 hack/parts good", `good +ok`},
		{"no time without a cache", "BUDGET=100 hack/parts cold", `cold +not begun`},
		{"no time on a slow machine", "echo 9 > bin/test/logs/wiring.seconds; BUDGET=100 hack/parts good", `about 270 s`},
	} {
		t.Run(step.name, func(t *testing.T) {
			got := tree.run(t, "{ "+step.do+"; } 2>&1 && echo status 0 || echo status 1")
			if !regexp.MustCompile(step.want).MatchString(got) {
				t.Errorf("%s: got %q, want %q", step.do, got, step.want)
			}
		})
	}
}

// in-netns has to hide the machine's links and keep its cgroups, and its mounts are
// shared as a node's are, but not with the machine.
func TestInNetns(t *testing.T) {
	if os.Getuid() != 0 {
		t.Fatal("needs root: in-netns makes namespaces")
	}
	const inside = `ip -brief link | wc -l; ip -brief address show lo | cut -d' ' -f1
		ip link add hack-test type bridge && mkdir "$1" && mount -t tmpfs hack-test "$1"
		ls -d /sys/fs/cgroup/*/cgroup.procs /sys/fs/cgroup/cgroup.procs 2>/dev/null | head -n 1
		findmnt -no PROPAGATION "$1"`
	dir := filepath.Join(t.TempDir(), "mount")
	out, err := exec.Command("./in-netns", "sh", "-euc", inside, "sh", dir).CombinedOutput()
	if err != nil {
		t.Fatalf("in-netns: %v: %s", err, out)
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	if len(lines) != 4 || lines[0] != "1" || lines[1] != "lo" || lines[3] != "shared" {
		t.Errorf("want one link, lo, a cgroup and a shared mount, got %q", lines)
	}
	if strings.Contains(read(t, "/proc/self/mountinfo"), dir) {
		t.Errorf("a mount made inside reached the machine: %s", dir)
	}
	if err := exec.Command("ip", "link", "show", "hack-test").Run(); err == nil {
		t.Error("a link made inside reached the machine")
	}
}

// What systemd does to the unit it does to every pod: see the unit.
func TestUnitDoesNotReachIntoPods(t *testing.T) {
	text := read(t, "minicri.service")
	for line := range strings.Lines(text) {
		key, _, _ := strings.Cut(line, "=")
		for _, inherited := range []string{"Protect", "Private", "Restrict", "SystemCall", "NoNewPrivileges", "Lock", "Capability", "Memory", "LimitCORE"} {
			if strings.HasPrefix(key, inherited) {
				t.Errorf("pods inherit %q", strings.TrimSpace(line))
			}
		}
	}
	if !strings.Contains(text, "\nOOMPolicy=continue\n") {
		t.Error("the end of a decoder ends the daemon")
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// A node whose daemon is refused a start for a while is not given up, and proxies have
// a place.
func TestUnitStartsForEver(t *testing.T) {
	text, err := os.ReadFile("minicri.service")
	if err != nil {
		t.Fatal(err)
	}
	section, sections := "", map[string]string{}
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "[") {
			section = strings.TrimSpace(line)
		}
		sections[section] += line
	}
	for line, of := range map[string]string{
		"StartLimitIntervalSec=0": "[Unit]", "Before=kubelet.service": "[Unit]", "Documentation=man:minicri(8)": "[Unit]",
		"EnvironmentFile=-/etc/default/minicri": "[Service]", "Restart=always": "[Service]",
	} {
		if !strings.Contains(sections[of], "\n"+line) {
			t.Errorf("%s is not in %s", line, of)
		}
	}
}

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
