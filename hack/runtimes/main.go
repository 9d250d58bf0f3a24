// Command runtimes compares a run of the container tests under another runtime
// with the failures that docs/contributors/runtimes.md lists for it:
//
//	runtimes RUNTIME docs/contributors/runtimes.md < output of go test -v
//
// A test that fails and is not in the list is an error, and so is one in the list
// that passes: the page is as current as the last run. One that fails at times only
// has a question mark behind the runtime's name, and may do either.
package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: runtimes RUNTIME docs/contributors/runtimes.md < output of go test -v")
		os.Exit(2)
	}
	page, err := os.ReadFile(os.Args[2])
	if err == nil {
		err = compare(os.Stdout, os.Stdin, os.Args[1], listed(string(page), os.Args[1]), listed(string(page), os.Args[1]+"?"))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "runtimes:", err)
		os.Exit(1)
	}
}

// listed returns the tests that a page lists as failing under a runtime: rows of a table
// with a test, the runtimes, and the reason.
func listed(page, runtime string) (tests []string) {
	for line := range strings.Lines(page) {
		cells := strings.Split(strings.TrimSpace(line), "|")
		if len(cells) < 4 || !strings.HasPrefix(strings.TrimSpace(cells[1]), "Test") {
			continue
		}
		if slices.Contains(strings.Split(strings.ReplaceAll(cells[2], " ", ""), ","), runtime) {
			tests = append(tests, strings.TrimSpace(cells[1]))
		}
	}
	return tests
}

// results are the tests of an output, without their parts, by how they ended.
func results(output io.Reader) (ended map[string][]string, err error) {
	ended = make(map[string][]string)
	lines := bufio.NewScanner(output)
	lines.Buffer(nil, 1<<24)
	for lines.Scan() {
		rest, is := strings.CutPrefix(lines.Text(), "--- ")
		kind, rest, found := strings.Cut(rest, ": ")
		if !is || !found {
			continue
		}
		name, _, _ := strings.Cut(rest, " ")
		ended[kind] = append(ended[kind], name)
	}
	return ended, lines.Err()
}

// compare reports the differences from the list: known tests fail, flaky ones may fail.
func compare(w io.Writer, output io.Reader, runtime string, known, flaky []string) error {
	ended, err := results(output)
	if err != nil {
		return err
	}
	if len(ended["PASS"]) == 0 {
		return fmt.Errorf("no test has passed with %s: is this the output of go test -v?", runtime)
	}
	slices.Sort(ended["SKIP"])
	fmt.Fprintf(w, "%s: %d tests pass, %d fail, %d are skipped: %s\n", runtime, len(ended["PASS"]), len(ended["FAIL"]), len(ended["SKIP"]), strings.Join(ended["SKIP"], " "))
	var wrong []string
	for _, name := range ended["FAIL"] {
		if !slices.Contains(known, name) && !slices.Contains(flaky, name) {
			wrong = append(wrong, name+" fails, and is not in the list")
		}
	}
	for _, name := range known {
		if !slices.Contains(ended["FAIL"], name) {
			wrong = append(wrong, name+" is in the list, and does not fail")
		}
	}
	if len(wrong) > 0 {
		return fmt.Errorf("%s:\n%s", runtime, strings.Join(wrong, "\n"))
	}
	return nil
}
