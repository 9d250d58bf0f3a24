package api_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// What is generated is what the pinned generator makes of shim.proto, by the
// command of `make generate`.
func TestGeneratedIsCurrent(t *testing.T) {
	tools, err := filepath.Abs("../../bin/tools")
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", tools+":"+os.Getenv("PATH"))
	out := t.TempDir()
	command := exec.Command(filepath.Join(tools, "protogen"), "shim.proto", out, "protoc-gen-go", "protoc-gen-go-ttrpc")
	if said, err := command.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s (make test builds it: bin/tools/.built)", err, said)
	}
	generated, err := filepath.Glob("*.pb.go")
	if err != nil || len(generated) != 2 {
		t.Fatalf("generated files: %v, %v", generated, err)
	}
	for _, name := range generated {
		present, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		wanted, err := os.ReadFile(filepath.Join(out, name))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(present, wanted) {
			t.Errorf("%s is not what shim.proto gives: run make generate", name)
		}
	}
}
