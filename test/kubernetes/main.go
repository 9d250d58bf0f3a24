// Command kubernetes compares a report of Kubernetes' own tests (ginkgo's JSON)
// with the list of their results in specs.txt:
//
//	kubernetes [-update | -beside OTHER] REPORT SPECS
//
// A line of the list is pass or fail, a tab, the name of the spec, and for a fail a tab and the reason. A spec that
// fails and is not listed to fail is an error, and so is one that is listed to fail and passes: the list has to be
// current. With -update the results of the report are written into the list; the reasons stay. With -beside the list of
// another runtime is compared with the report: a spec that is listed to fail there and passes here is an error.
package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
)

const (
	pass = "pass"
	fail = "fail"
)

// result is that of one spec.
type result struct{ state, reason string }

func main() {
	update := flag.Bool("update", false, "write the results into the list")
	beside := flag.String("beside", "", "compare with the list of another runtime")
	flag.Parse()
	if flag.NArg() != 2 {
		fmt.Fprintln(os.Stderr, "kubernetes: usage: kubernetes [-update | -beside OTHER] REPORT SPECS")
		os.Exit(2)
	}
	if err := run(flag.Arg(0), flag.Arg(1), *update, *beside); err != nil {
		fmt.Fprintln(os.Stderr, "kubernetes:", err)
		os.Exit(1)
	}
}

func run(report, specs string, update bool, beside string) error {
	got, err := readReport(report)
	if err != nil {
		return err
	}
	want, err := readSpecs(cmp.Or(beside, specs))
	switch {
	case err != nil:
		return err
	case beside != "":
		return compareRuntimes(got, want, beside)
	case !update:
		return compare(got, want)
	}
	for name, r := range got {
		if r.state == pass || want[name].state == pass || want[name].state == "" { // what failed before, too, keeps its reason
			want[name] = r
		}
	}
	return writeSpecs(specs, want)
}

// compareRuntimes finds the specs that the list of another runtime has as failed and that pass in the report.
func compareRuntimes(got, listed map[string]result, other string) error {
	var worse []error
	for _, name := range slices.Sorted(maps.Keys(got)) {
		if got[name].state == pass && listed[name].state == fail {
			worse = append(worse, fmt.Errorf("passes here, and fails in %s: %s: %s", other, name, listed[name].reason))
		}
	}
	return errors.Join(worse...)
}

// readReport returns the specs that ran.
func readReport(path string) (map[string]result, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var suites []struct {
		SpecReports []struct {
			ContainerHierarchyTexts    []string
			LeafNodeType, LeafNodeText string
			State                      string
			Failure                    struct{ Message string }
		}
	}
	if err := json.Unmarshal(data, &suites); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	got := make(map[string]result)
	for _, suite := range suites {
		for _, spec := range suite.SpecReports {
			if spec.LeafNodeType != "It" {
				continue
			}
			name := strings.Join(append(spec.ContainerHierarchyTexts, spec.LeafNodeText), " ")
			switch message, _, _ := strings.Cut(spec.Failure.Message, "\n"); spec.State {
			case "passed":
				got[name] = result{state: pass}
			case "failed", "panicked", "timedout", "interrupted", "aborted":
				got[name] = result{fail, message}
			}
		}
	}
	if len(got) == 0 {
		return nil, errors.New("the report says of no spec that it ran")
	}
	return got, nil
}

func readSpecs(path string) (map[string]result, error) {
	specs := make(map[string]result)
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return specs, nil
	}
	if err != nil {
		return nil, err
	}
	for i, line := range strings.Split(strings.TrimSpace(string(data)), "\n") {
		if strings.HasPrefix(line, "#") {
			continue
		}
		fields := strings.SplitN(line, "\t", 3)
		if len(fields) < 2 || fields[0] != pass && fields[0] != fail || fields[0] == fail && len(fields) < 3 {
			return nil, fmt.Errorf("%s: line %d: %q is no pass or fail, name and reason", path, i+1, line)
		}
		specs[fields[1]] = result{fields[0], strings.Join(fields[2:], "")}
	}
	return specs, nil
}

func writeSpecs(path string, specs map[string]result) error {
	names := slices.SortedFunc(maps.Keys(specs), func(a, b string) int {
		return cmp.Or(cmp.Compare(specs[a].state, specs[b].state), cmp.Compare(a, b))
	})
	content := "# Specs of Kubernetes' own tests and their results; see docs/conformance.md.\n"
	for _, name := range names {
		line := specs[name].state + "\t" + name
		if specs[name].state == fail {
			line += "\t" + specs[name].reason
		}
		content += line + "\n"
	}
	return os.WriteFile(path, []byte(content), 0o644)
}

func compare(got, want map[string]result) error {
	count := make(map[string]int)
	var wrong []error
	for _, name := range slices.Sorted(maps.Keys(got)) {
		r := got[name]
		count[r.state]++
		switch {
		case r.state == fail && want[name].state != fail:
			wrong = append(wrong, fmt.Errorf("failed, and is not listed to: %s: %s", name, r.reason))
		case r.state == pass && want[name].state == fail:
			wrong = append(wrong, fmt.Errorf("passed, and is listed to fail: %s", name))
		}
	}
	fmt.Printf("%d specs: %d passed, %d failed\n", len(got), count[pass], count[fail])
	return errors.Join(wrong...)
}
