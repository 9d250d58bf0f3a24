// Command report reads the output of go test -json and prints one line for each package, and the output of the tests
// that failed. It lists each skipped test with its reason, and fails if a test failed or if hack/skips.txt does not
// list a skipped one.
package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
)

const (
	module = "github.com/minicri/minicri/"
	list   = "hack/skips.txt"
)

// event is a line of go test -json (go doc test2json).
type event struct {
	Action, Package, ImportPath, Test, Output string
	Elapsed                                   float64
}

// name is the test as hack/skips.txt has it: package, then test.
func (e event) name() string {
	pkg := strings.TrimSuffix(strings.TrimPrefix(e.Package+"/", module), "/")
	return strings.TrimSpace(cmp.Or(pkg, ".") + " " + e.Test)
}

// topLevel is the package and the test of a line, without the test's part.
var topLevel = regexp.MustCompile(`^\S+ [^/:]+`)

type report struct {
	output map[string]string // the key is the test or the package, until its end
	skips  []string          // the tests, with their reasons
	failed bool
}

func main() {
	r := report{output: make(map[string]string)}
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<26)
	for lines.Scan() {
		var e event
		if json.Unmarshal(lines.Bytes(), &e) != nil {
			fmt.Println(lines.Text()) // a compiler wrote it, or a script around go test
			continue
		}
		r.add(e)
	}
	if err := lines.Err(); err != nil {
		fmt.Println("report:", err)
		r.failed = true
	}
	listed, err := os.ReadFile(list)
	if err != nil {
		fmt.Println("report:", err)
		r.failed = true
	}
	for _, skip := range r.skips {
		fmt.Println("skipped:", skip)
		test := topLevel.FindString(skip)
		if !regexp.MustCompile(`(?m)^` + strings.Replace(regexp.QuoteMeta(test), " ", " +", 1) + ` +\S`).Match(listed) {
			fmt.Printf("FAILED: %s is skipped and %s does not list it\n", test, list)
			r.failed = true
		}
	}
	if r.failed {
		os.Exit(1)
	}
}

func (r *report) add(e event) {
	name := e.name()
	switch e.Action {
	case "output":
		if !strings.HasPrefix(e.Output, "=== ") {
			r.output[name] += e.Output
		}
	case "build-output":
		fmt.Print(e.Output)
	case "build-fail":
		r.failed = true
	case "pass":
		if e.Test == "" {
			fmt.Printf("ok      %7.1f s  %s\n", e.Elapsed, name)
		}
		delete(r.output, name)
	case "skip":
		if e.Test != "" {
			r.skips = append(r.skips, name+": "+reason(r.output[name]))
		}
		delete(r.output, name)
	case "fail":
		r.failed = true
		fmt.Printf("FAILED  %7.1f s  %s\n%s", e.Elapsed, name, r.output[name])
		if e.Test == "" {
			r.interrupted(e.Package)
		}
		delete(r.output, name)
	}
}

// interrupted prints the output of tests that did not end: the package timed out, or its process died.
func (r *report) interrupted(pkg string) {
	for name, output := range r.output {
		if strings.HasPrefix(name, event{Package: pkg}.name()+" ") {
			fmt.Printf("UNENDED            %s\n%s", name, output)
			delete(r.output, name)
		}
	}
}

// reason is the last line that a test logged.
func reason(output string) string {
	lines := slices.DeleteFunc(strings.Split(output, "\n"), func(line string) bool {
		return strings.TrimSpace(line) == "" || strings.HasPrefix(strings.TrimSpace(line), "--- ")
	})
	if len(lines) == 0 {
		return "no reason"
	}
	return strings.TrimSpace(lines[len(lines)-1])
}
