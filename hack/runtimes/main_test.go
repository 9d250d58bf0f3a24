package main

import (
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const page = `
| test | runtimes | why |
|---|---|---|
| TestA | runc, shim-runc | a |
| TestB | shim-runc | b |
| TestD | runc?, shim-runc? | d |
`

func TestCompare(t *testing.T) {
	if got := listed(page, "shim-runc"); !slices.Equal(got, []string{"TestA", "TestB"}) {
		t.Errorf("listed: %v", got)
	}
	for output, says := range map[string]string{
		"--- PASS: TestB (1s)\n--- FAIL: TestA (0.1s)\n    --- FAIL: TestA/part (0s)\n--- SKIP: TestS (0s)\n": "",
		"--- PASS: TestB (1s)\n--- PASS: TestA (0.1s)\n":                                                      "TestA is in the list",
		"--- PASS: TestB (1s)\n--- FAIL: TestA (0.1s)\n--- FAIL: TestC (0.1s)\n":                              "TestC fails, and is not",
		"--- FAIL: TestA (0.1s)\n--- PASS: TestD (0s)\n":                                                      "",
		"--- PASS: TestB (0s)\n--- FAIL: TestA (0.1s)\n--- FAIL: TestD (0s)\n":                                "",
		"ok\n": "no test has passed",
	} {
		err := compare(io.Discard, strings.NewReader(output), "runc", listed(page, "runc"), listed(page, "runc?"))
		if (err == nil) != (says == "") || err != nil && !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v, want %q", output, err, says)
		}
	}
}

// The page names tests that there are, each with a reason.
func TestPageNamesTests(t *testing.T) {
	text, err := os.ReadFile("../../docs/contributors/runtimes.md")
	if err != nil {
		t.Fatal(err)
	}
	sources, err := os.ReadDir("../../test/container")
	if err != nil {
		t.Fatal(err)
	}
	var all strings.Builder
	for _, source := range sources {
		if strings.HasSuffix(source.Name(), "_test.go") {
			content, err := os.ReadFile("../../test/container/" + source.Name())
			if err != nil {
				t.Fatal(err)
			}
			all.Write(content)
		}
	}
	rows := regexp.MustCompile(`(?m)^\| (Test\w+) \|([^|]*)\|([^|]*)\|$`).FindAllStringSubmatch(string(text), -1)
	if len(rows) == 0 {
		t.Error("docs/contributors/runtimes.md has no list of tests")
	}
	for _, row := range rows {
		if !strings.Contains(all.String(), "func "+row[1]+"(t *testing.T)") || strings.TrimSpace(row[2]) == "" || strings.TrimSpace(row[3]) == "" {
			t.Errorf("%s is no test, or has no runtimes or no reason", row[1])
		}
	}
}
