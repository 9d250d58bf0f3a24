package api_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

// What is generated is what the pinned generator makes of shim.proto, by the command of `make generate`.
func TestGeneratedIsCurrent(t *testing.T) {
	tools, err := filepath.Abs("../../bin/tools")
	harness.Check(t, err)
	t.Setenv("PATH", tools+":"+os.Getenv("PATH"))
	out := t.TempDir()
	command := exec.Command(filepath.Join(tools, "protogen"), "shim.proto", out, "protoc-gen-go", "protoc-gen-go-ttrpc")
	said, err := command.CombinedOutput()
	harness.Need(t, err == nil, "%v: %s (make test builds it: bin/tools/.lint)", err, said)
	for _, name := range []string{"shim.pb.go", "shim_ttrpc.pb.go"} {
		present := harness.Read(t, name)
		wanted := harness.Read(t, filepath.Join(out, name))
		harness.Want(t, string(present) == string(wanted), "%s is not what shim.proto gives: run make generate", name)
	}
}
