package main

import (
	"encoding/json"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

type spec = map[string]any

func writeReport(t *testing.T, specs ...spec) string {
	data, err := json.Marshal([]any{spec{"SpecReports": specs}})
	path := filepath.Join(t.TempDir(), "report.json")
	harness.Check(t, errors.Join(err, os.WriteFile(path, data, 0o600)))
	return path
}

func it(name, state, message string) spec {
	return spec{"LeafNodeType": "It", "ContainerHierarchyTexts": []string{"[sig-node]"}, "LeafNodeText": name, "State": state, "Failure": spec{"Message": message}}
}

// What a run of some specs says goes into the list; what it does not speak of stays.
func TestUpdateKeepsWhatDidNotRun(t *testing.T) {
	list := filepath.Join(t.TempDir(), "specs.txt")
	first := writeReport(t, it("passes", "passed", ""), it("fails", "failed", "no such device"), it("is mended", "failed", "a defect"))
	harness.Check(t, run(first, list, true, ""))
	second := writeReport(t, it("is mended", "passed", ""), it("is new", "timedout", "waited\tlong\nand more"), it("did not run", "skipped", ""))
	harness.Check(t, run(second, list, true, ""))
	got, err := readSpecs(list)
	harness.Check(t, err)
	want := map[string]result{
		"[sig-node] passes": {pass, ""}, "[sig-node] fails": {fail, "no such device"},
		"[sig-node] is mended": {pass, ""}, "[sig-node] is new": {fail, "waited\tlong"},
	}
	harness.Want(t, maps.Equal(got, want), "the list is %v, want %v", got, want)
}

func TestCompare(t *testing.T) {
	list := filepath.Join(t.TempDir(), "specs.txt")
	harness.Check(t, writeSpecs(list, map[string]result{"[sig-node] a": {pass, ""}, "[sig-node] b": {fail, "why"}}))
	for name, c := range map[string]struct {
		report []spec
		wrong  bool
	}{
		"as listed":            {[]spec{it("a", "passed", ""), it("b", "failed", "")}, false},
		"fails unlisted":       {[]spec{it("a", "failed", "")}, true},
		"passes, is to fail":   {[]spec{it("b", "passed", "")}, true},
		"fails and is unknown": {[]spec{it("c", "panicked", "")}, true},
		"nothing ran":          {[]spec{it("a", "skipped", "")}, true},
	} {
		err := run(writeReport(t, c.report...), list, false, "")
		harness.Want(t, (err != nil) == c.wrong, "%s: %v", name, err)
	}
}
