package oci

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/encoding/protojson"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/machine"
)

var update = flag.Bool("update", false, "write what the rules make into testdata, instead of comparing")

// goldenCase is one entry of a golden file for sandboxes: what a rule is
// given, written by hand, and what it makes of it.
type goldenCase struct {
	Case string `json:"case"`
	// Config is a PodSandboxConfig in the JSON form of protobuf.
	Config  json.RawMessage `json:"config"`
	NetNS   string          `json:"netns,omitempty"`
	UserNS  string          `json:"userns,omitempty"`
	Machine machine.Machine `json:"machine,omitzero"`
	outcome
}

// outcome is the part of the spec, or the error, that a rule makes; -update
// fills it in.
type outcome struct {
	Spec  json.RawMessage `json:"spec,omitempty"`
	Error string          `json:"error,omitempty"`
}

func (o *outcome) made() *outcome { return o }

// goldenSpecs makes the specs of the cases of testdata/NAME.json, and compares the part
// that the file is about.
func goldenSpecs(t *testing.T, name string, part func(*specs.Spec) any) {
	t.Helper()
	goldenFile(t, name, func(c *goldenCase) outcome {
		spec, err := ForSandbox(sandboxOf(t, *c))
		return outcomeOf(t, spec, err, part)
	})
}

func outcomeOf(t *testing.T, spec *specs.Spec, err error, part func(*specs.Spec) any) outcome {
	t.Helper()
	if err != nil {
		return outcome{Error: err.Error()}
	}
	return outcome{Spec: compact(t, part(spec))}
}

// goldenFile compares what is made of each case of testdata/NAME.json with what
// is written there, or writes it there.
func goldenFile[C any, P interface {
	*C
	made() *outcome
}](t *testing.T, name string, run func(*C) outcome) {
	t.Helper()
	file := filepath.Join("testdata", name+".json")
	cases := readGolden[C, P](t, file)
	for i := range cases {
		want, got := P(&cases[i]).made(), run(&cases[i])
		if !*update && (got.Error != want.Error || !bytes.Equal(got.Spec, want.Spec)) {
			t.Errorf("%s, case %d:\n got %s %s\nwant %s %s", file, i, got.Spec, got.Error, want.Spec, want.Error)
		}
		*want = got
	}
	if *update {
		writeGolden(t, file, cases)
	}
}

func readGolden[C any, P interface {
	*C
	made() *outcome
}](t *testing.T, file string) []C {
	t.Helper()
	data, err := os.ReadFile(file)
	must(t, err)
	var cases []C
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&cases); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	if len(cases) == 0 {
		t.Fatalf("%s has no cases", file)
	}
	for i := range cases {
		if made := P(&cases[i]).made(); len(made.Spec) > 0 {
			made.Spec = compact(t, made.Spec)
		}
	}
	return cases
}

func writeGolden(t *testing.T, file string, cases any) {
	t.Helper()
	data, err := json.MarshalIndent(cases, "", "  ")
	if err == nil {
		err = os.WriteFile(file, append(data, '\n'), 0o644)
	}
	must(t, err)
}

func sandboxOf(t *testing.T, c goldenCase) *Sandbox {
	t.Helper()
	config := &runtimeapi.PodSandboxConfig{}
	if err := protojson.Unmarshal(c.Config, config); err != nil {
		t.Fatalf("case %q: %v", c.Case, err)
	}
	return &Sandbox{
		ID:          "4e5f",
		Config:      config,
		Rootfs:      "/var/lib/minicri/pause/rootfs",
		EmptyDir:    "/var/lib/minicri/pause/empty",
		NetNS:       c.NetNS,
		UserNS:      c.UserNS,
		CgroupsPath: "/kubepods/minicri-4e5f",
		Machine:     c.Machine,
	}
}

func compact(t *testing.T, value any) json.RawMessage {
	t.Helper()
	data, err := json.Marshal(value)
	must(t, err)
	return data
}
