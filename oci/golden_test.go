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
)

var update = flag.Bool("update", false, "write what the rules make into testdata, instead of comparing")

// goldenCase is one entry of a golden file: what a rule is given, and the part
// of the spec, or the error, that it makes of it. -update fills in the last
// two; the others are written by hand.
type goldenCase struct {
	Case string `json:"case"`
	// Config is a PodSandboxConfig in the JSON form of protobuf.
	Config  json.RawMessage `json:"config"`
	NetNS   string          `json:"netns,omitempty"`
	UserNS  string          `json:"userns,omitempty"`
	Machine Machine         `json:"machine,omitzero"`
	Spec    json.RawMessage `json:"spec,omitempty"`
	Error   string          `json:"error,omitempty"`
}

// golden runs a rule over the cases of testdata/NAME.json, each on a spec in
// which nothing is set yet, and compares the part that the rule is to set.
func golden(t *testing.T, name string, rule sandboxRule, part func(*specs.Spec) any) {
	t.Helper()
	goldenSpecs(t, name, part, func(s *Sandbox) (*specs.Spec, error) {
		spec := &specs.Spec{Process: &specs.Process{Capabilities: &specs.LinuxCapabilities{}}, Linux: &specs.Linux{}}
		return spec, rule(s, spec)
	})
}

func goldenSpecs(t *testing.T, name string, part func(*specs.Spec) any, makeSpec func(*Sandbox) (*specs.Spec, error)) {
	t.Helper()
	file := filepath.Join("testdata", name+".json")
	cases := readGolden(t, file)
	for i, want := range cases {
		got := want
		spec, err := makeSpec(sandboxOf(t, want))
		got.Spec, got.Error = nil, ""
		if err != nil {
			got.Error = err.Error()
		} else {
			got.Spec = compact(t, part(spec))
		}
		if !*update && (got.Error != want.Error || !bytes.Equal(got.Spec, want.Spec)) {
			t.Errorf("%s, case %q:\n got %s %s\nwant %s %s", file, want.Case, got.Spec, got.Error, want.Spec, want.Error)
		}
		cases[i] = got
	}
	if *update {
		writeGolden(t, file, cases)
	}
}

func readGolden(t *testing.T, file string) []goldenCase {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var cases []goldenCase
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&cases); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	if len(cases) == 0 {
		t.Fatalf("%s has no cases", file)
	}
	for i := range cases {
		if len(cases[i].Spec) > 0 {
			cases[i].Spec = compact(t, cases[i].Spec)
		}
	}
	return cases
}

func writeGolden(t *testing.T, file string, cases []goldenCase) {
	t.Helper()
	data, err := json.MarshalIndent(cases, "", "  ")
	if err == nil {
		err = os.WriteFile(file, append(data, '\n'), 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
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
	if err != nil {
		t.Fatal(err)
	}
	return data
}
