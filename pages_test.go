package minicri_test

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/manual"
	"github.com/minicri/minicri/internal/metrics"
	"github.com/minicri/minicri/test/harness"
)

// page is a document of the repository. Commands are the lines of its code spans and code blocks.
type page struct {
	file, text string
	spans      []string
	commands   []string
}

func everyPage(t *testing.T) (pages []page) {
	files := slices.Concat(harness.Glob(t, "*.md"), harness.Glob(t, "docs/*.md"), harness.Glob(t, "docs/contributors/*.md"))
	block := regexp.MustCompile("(?s)```.*?```")
	for _, file := range files {
		text := harness.Read(t, file)
		p := page{file: file, text: string(text)}
		for _, found := range regexp.MustCompile("`([^`\n]+)`").FindAllStringSubmatch(block.ReplaceAllString(p.text, ""), -1) {
			p.spans = append(p.spans, found[1])
		}
		p.commands = slices.Clone(p.spans)
		for line := range strings.Lines(p.text) {
			if command, is := strings.CutPrefix(line, "    "); is {
				command, _, _ = strings.Cut(command, " #")
				p.commands = append(p.commands, strings.TrimSpace(command))
			}
		}
		pages = append(pages, p)
	}
	return pages
}

// Everything that a page names exists: tests, files, links and their headings, make
// targets, commands and flags of minicri, keys of the configuration, metrics.
func TestPagesNameWhatIsThere(t *testing.T) {
	tests, targets, families := testNames(t), makeTargets(t), metricNames()
	for _, p := range everyPage(t) {
		for _, name := range testName.FindAllString(p.text, -1) {
			harness.Want(t, tests[name] || strings.Contains(p.text, name+"..."), "%s: there is no test %s", p.file, name)
		}
		for _, command := range p.commands {
			for _, problem := range checkCommand(command, targets) {
				t.Errorf("%s: %q: %s", p.file, command, problem)
			}
		}
		for _, span := range p.spans {
			harness.Same(t, p.file, checkSpan(span, families), "")
		}
		for _, problem := range checkLinks(p) {
			t.Errorf("%s: %s", p.file, problem)
		}
	}
}

// The examples of the daemon's configuration have no unknown keys. Package image reads the examples of hosts.toml.
func TestConfigurationsOnPages(t *testing.T) {
	read := 0
	for _, p := range everyPage(t) {
		for _, block := range regexp.MustCompile("(?s)\n *```toml\n(.*?)```").FindAllStringSubmatch(p.text, -1) {
			if strings.Contains(block[1], "/hosts.toml\n") {
				continue
			}
			file := filepath.Join(t.TempDir(), "config.toml")
			must(t, os.WriteFile(file, []byte(block[1]), 0o644))
			loaded, err := config.LoadFile(file)
			if err == nil {
				err = loaded.Strict()
			}
			harness.Want(t, err == nil, "%s: %v:\n%s", p.file, err, block[1])
			read++
		}
	}
	harness.Want(t, read >= 5, "only %d configurations were read", read)
}

// checkSpan looks at a code span that has the form of a path in the repository,
// of a key of the configuration or of a metric.
func checkSpan(span string, families map[string]bool) string {
	first, rest, isPath := strings.Cut(span, "/")
	if isPath && regexp.MustCompile(`^[\w./-]+$`).MatchString(rest) && first != "bin" {
		if info, err := os.Stat(first); first != "" && err == nil && info.IsDir() {
			if _, err := os.Stat(span); err != nil {
				return err.Error()
			}
		}
	}
	keys := config.Keys()
	named := func(name string) bool {
		return slices.ContainsFunc(keys, func(k config.Key) bool { return k.Name == name })
	}
	table, _, isKey := strings.Cut(span, ".")
	if isKey && regexp.MustCompile(`^[a-z_]+\.[a-z_]+$`).MatchString(span) && named(table) && !named(span) {
		return "the configuration has no key " + span
	}
	if regexp.MustCompile(`^minicri_[a-z_]+$`).MatchString(span) && !families[span] {
		return "there is no metric " + span
	}
	return ""
}

// checkCommand looks at a command line that begins with make or minicri.
func checkCommand(line string, targets map[string]bool) (problems []string) {
	line, _, _ = strings.Cut(line, " && ")
	words := strings.Fields(line)
	for len(words) > 0 && regexp.MustCompile(`^[A-Z_]+=`).MatchString(words[0]) {
		words = words[1:]
	}
	switch {
	case len(words) < 2:
	case words[0] == "make":
		for _, target := range words[1:] {
			if regexp.MustCompile(`^[a-z][\w-]*$`).MatchString(target) && !targets[target] {
				problems = append(problems, "there is no target "+target)
			}
		}
	case words[0] == "minicri" && regexp.MustCompile(`^[a-z]+$`).MatchString(words[1]):
		problems = checkMinicri(words[1:])
	}
	return problems
}

func checkMinicri(words []string) (problems []string) {
	cmd, rest, err := manual.Program(nil, nil).Find(words)
	if err != nil || !cmd.HasParent() {
		return []string{"minicri has no such command"}
	}
	for _, word := range rest {
		name, isFlag := strings.CutPrefix(word, "--")
		name, _, _ = strings.Cut(name, "=")
		if isFlag && cmd.Flags().Lookup(name) == nil && cmd.InheritedFlags().Lookup(name) == nil {
			problems = append(problems, "it has no flag "+word)
		}
	}
	return problems
}

// checkLinks looks at links into the repository and their headings.
func checkLinks(p page) (problems []string) {
	for _, found := range regexp.MustCompile(`\]\(([^)#]*)(?:#([^)]*))?\)`).FindAllStringSubmatch(p.text, -1) {
		if strings.HasPrefix(found[1], "http") {
			continue
		}
		file := p.file
		if found[1] != "" {
			file = filepath.Join(filepath.Dir(p.file), found[1])
		}
		text, err := os.ReadFile(file)
		switch {
		case err != nil:
			if info, statErr := os.Stat(file); statErr != nil || !info.IsDir() {
				problems = append(problems, err.Error())
			}
		case found[2] != "" && !slices.Contains(headings(string(text)), found[2]):
			problems = append(problems, fmt.Sprintf("%s has no heading #%s", file, found[2]))
		}
	}
	return problems
}

// headings returns the headings of a page in the form of links.
func headings(text string) (names []string) {
	for _, found := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(text, -1) {
		name := regexp.MustCompile(`[^\w -]`).ReplaceAllString(strings.ToLower(found[1]), "")
		names = append(names, strings.ReplaceAll(name, " ", "-"))
	}
	return names
}

// makeTargets returns the targets of the Makefile, with bench-% for each benchmark.
func makeTargets(t *testing.T) map[string]bool {
	text := harness.Read(t, "Makefile")
	targets := map[string]bool{}
	for _, found := range regexp.MustCompile(`(?m)^([\w ./-]+):(?:[^=]|$)`).FindAllStringSubmatch(string(text), -1) {
		for _, target := range strings.Fields(found[1]) {
			targets[target] = true
		}
	}
	benches, err := fs.Glob(os.DirFS("test/bench"), "*/main.go")
	harness.Want(t, err == nil && len(benches) > 0, "no benchmarks: %v", err)
	for _, main := range benches {
		targets["bench-"+filepath.Dir(main)] = true
	}
	return targets
}

// A rule or a panel for a metric that is not there never fires.
func TestAlertsAndDashboardNameMetrics(t *testing.T) {
	families := metricNames()
	for _, file := range []string{"hack/alerts.yml", "hack/grafana.json"} {
		text := harness.Read(t, file)
		found := regexp.MustCompile(`minicri_[a-z_]+`).FindAllString(string(text), -1)
		for _, name := range found {
			harness.Want(t, families[name] || families[regexp.MustCompile(`_(bucket|count|sum)$`).ReplaceAllString(name, "")],
				"%s: there is no metric %s", file, name)
		}
		harness.Want(t, len(found) >= 5, "%s: %d metrics", file, len(found))
	}
	page := string(harness.Read(t, "docs/dashboards.md"))
	for _, alert := range regexp.MustCompile(`alert: (\w+)`).FindAllSubmatch(harness.Read(t, "hack/alerts.yml"), -1) {
		harness.Want(t, strings.Contains(page, "| "+string(alert[1])+" |"), "docs/dashboards.md has no row for %s", alert[1])
	}
}

func metricNames() map[string]bool {
	names := map[string]bool{}
	for _, f := range metrics.Families() {
		names[f.Name] = true
	}
	return names
}
