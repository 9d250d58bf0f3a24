// Command prose checks the English of the Markdown pages and of Go comments. CONTRIBUTING.md gives the rules.
// hack/prose/unclean.txt lists files that are not clean yet; the list only shrinks.
// "go run ./hack/prose -prune" removes files from the list that are clean or do not exist.
package main

import (
	"fmt"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
)

const (
	listFile = "hack/prose/unclean.txt"
	// start is the beginning of a text, of a sentence, or of the words after a label in bold.
	start   = `(?:\A|\n\n|[.!?][)"]? )\W*`
	subject = "begin with the subject"
)

// rule is a pattern that plain English avoids. A blank in it matches any white space.
type rule struct {
	pattern *regexp.Regexp
	advice  string
}

func newRule(pattern, advice string) rule {
	return rule{regexp.MustCompile(strings.ReplaceAll(pattern, " ", `\s+`)), advice}
}

var (
	prose = []rule{
		newRule(start+`((?:What(?:ever)?|Who(?:ever|se)?|Where|Of)\b[^?.!]*(?:[.!]|\z))`, subject),
		newRule(start+`(For (?:an?|another|the|each|every|all|one|what|who|those|that|this|these|it|them)\b)`, subject),
		newRule(`\b(what (?:is|are|was|were|has|have|had|does|did|can|cannot|must|may|would|it|its|they|the|a|an|this|`+
			`that|their|each|every|no|nobody|one|only|others?|another|there|comes|came|becomes?|became|goes|`+
			`runs|ran|waits|needs|names|takes|took|belongs|remains|follows|fails|failed|ended|ends|minicri)\b)`,
			"name the thing"),
		newRule(`(,(?: of)? which\b)`, "make two sentences"),
		newRule(`\b((?:that|those|the same) of\b|of (?:the )?[a-z]+'s(?:[.,:;]|\z))`, "repeat the noun"),
		newRule(`\b(says|knows|tells|hears|asks|(?:is|are|was|were|be|been|being) (?:said|told|asked|heard)`+
			`|(?:does|did|do|can|could) ?not (?:say|know|hear|tell)|that (?:say|know|hear|ask|tell))\b`,
			"programs return, report, log, request or check"),
		newRule(`\b([Ww]ant of|stands? beside|(?:is|are|was|were) gone|holds? up|held up|comes? to)\b`,
			"no metaphors: exists, was removed, blocks, returns"),
		newRule(`((?:\bkey|field|value|name|id|metadata|config|argument|flag|:) is missing)\b`, "write: is required"),
	}
	fragment = newRule(`\A((?:of|for|by|it|as|what|who|whose|where) [^\n]*)`, subject)
	page     = []rule{
		newRule(`((?:Test|Fuzz)[A-Z]\w*)`, "users need no name of a test: move it to a page for developers"),
		newRule(`\b([a-f][0-9a-f]{6,}|[0-9][a-f][0-9a-f]{5,}|[0-9]{2}[a-f][0-9a-f]{4,}|[0-9]{3,6}[a-f][0-9a-f]{3,})\b`,
			"users need no commit: move it to test/results"),
	}
	// developer matches the pages that may name tests and commits.
	developer = regexp.MustCompile(`^(ARCHITECTURE|CONTRIBUTING|docs/(conformance|contributors/\w+))\.md$`)
)

func main() {
	list, err := os.ReadFile(listFile)
	fail(err)
	out, err := exec.Command("git", "ls-files", "--cached", "--others", "--exclude-standard",
		"*.go", "*.md", ":!*.pb.go", ":!*_ttrpc*", ":!test/results").Output()
	fail(err)
	unclean, kept, bad := strings.Fields(string(list)), []string(nil), false
	for _, file := range strings.Fields(string(out)) {
		text, err := os.ReadFile(file)
		if os.IsNotExist(err) {
			continue
		}
		fail(err)
		findings := check(file, text)
		switch {
		case len(findings) == 0:
		case slices.Contains(unclean, file):
			kept = append(kept, file)
		default:
			bad = true
			fmt.Fprintln(os.Stderr, strings.Join(findings, "\n"))
		}
	}
	if slices.Contains(os.Args[1:], "-prune") {
		fail(os.WriteFile(listFile, []byte(strings.Join(append(kept, ""), "\n")), 0o644))
	} else if len(kept) != len(unclean) {
		bad = true
		fmt.Fprintf(os.Stderr, "%s lists clean or removed files: run \"go run ./hack/prose -prune\"\n", listFile)
	}
	if bad {
		os.Exit(1)
	}
}

// check returns one line for each violation in a file.
func check(file string, text []byte) (findings []string) {
	report := func(line int, text string, rules []rule) {
		for _, r := range rules {
			for _, at := range r.pattern.FindAllStringSubmatchIndex(text, -1) {
				words := strings.Join(strings.Fields(text[at[2]:min(at[3], at[2]+40)]), " ")
				line := line + strings.Count(text[:at[2]], "\n")
				findings = append(findings, fmt.Sprintf("%s:%d: %q: %s", file, line, words, r.advice))
			}
		}
	}
	if strings.HasSuffix(file, ".md") {
		rules := slices.Clone(prose)
		if !developer.MatchString(file) {
			rules = append(rules, page...)
		}
		report(1, plain(string(text)), rules)
		return findings
	}
	files := token.NewFileSet()
	parsed, err := parser.ParseFile(files, file, text, parser.ParseComments|parser.SkipObjectResolution)
	fail(err)
	for _, group := range parsed.Comments {
		text := block.ReplaceAllString(group.Text(), "")
		report(files.Position(group.Pos()).Line, text, append([]rule{fragment}, prose...))
	}
	return findings
}

var (
	code    = regexp.MustCompile("(?ms)^ *```.*?^ *```$|<!--.*?-->|^(?:    |\t)[^\n]*$")
	block   = regexp.MustCompile(`(?m)^[\t ].*$`)
	span    = regexp.MustCompile("`(Test[A-Z][^`\n]*)`|`[^`\n]+`")
	link    = regexp.MustCompile(`\]\([^)\n]*\)`)
	markers = regexp.MustCompile(`(?m)^(#+|[*-]|[0-9]+\.|\|) | \|( |$)|^\|[ |-]+$`)
)

// plain returns the prose of a Markdown page. Each line keeps its number; list items and cells of tables become
// sentences of their own.
func plain(text string) string {
	blank := func(s string) string { return strings.Repeat("\n", strings.Count(s, "\n")) }
	text = code.ReplaceAllStringFunc(text, blank)
	text = link.ReplaceAllString(span.ReplaceAllString(text, "X$1"), "]")
	text = markers.ReplaceAllString(text, ". ")
	return strings.NewReplacer("**", "", "[", "", "]", "").Replace(text)
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "prose:", err)
		os.Exit(1)
	}
}
