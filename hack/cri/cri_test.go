package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

const root = "../.."

func TestPagesAreCurrent(t *testing.T) {
	users, developers, err := write(root)
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range []struct{ file, want string }{
		{"docs/cri.md", users},
		{"docs/contributors/cri.md", developers},
	} {
		got, err := os.ReadFile(root + "/" + page.file)
		if err != nil {
			t.Fatal(err)
		}
		if string(got) != page.want {
			t.Errorf("%s is not current: run `make generate`", page.file)
		}
	}
}

// Every RPC and every field has a test, or a limit that explains why it has none.
func TestEveryFieldHasATestOrALimit(t *testing.T) {
	rpcs, messages, err := api()
	if err != nil {
		t.Fatal(err)
	}
	shown, err := annotations(root)
	if err != nil {
		t.Fatal(err)
	}
	noted, err := notes()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, rpc := range rpcs {
		names = append(names, rpc.name)
	}
	for _, message := range messages {
		names = append(names, message.fields...)
	}
	for _, name := range names {
		if len(shown[name]) == 0 && noted[name] == "" {
			t.Errorf("%s has no test, and notes.txt has no limit for it", name)
		}
	}
}

// The api.proto of this API has nothing new. A longer one has, and the list leaves out the messages for Windows.
func TestNewer(t *testing.T) {
	dir, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "k8s.io/cri-api").Output()
	if err != nil {
		t.Fatal(err)
	}
	same := filepath.Join(strings.TrimSpace(string(dir)), "pkg/apis/runtime/v1/api.proto")
	text, err := os.ReadFile(same)
	if err != nil {
		t.Fatal(err)
	}
	more := filepath.Join(t.TempDir(), "api.proto")
	const added = `
service Other {
    rpc Freeze(A) returns (B) {}
}
message PodSandboxConfig {
    map<string, Mount> added = 99;
}
message Added {
    // no = 1;
    optional int64 one = 1;
    repeated a.B two = 2;
}
message WindowsAdded {
    string no = 1;
}
`
	if err := os.WriteFile(more, append(text, added...), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, one := range []struct{ file, want string }{
		{same, ""},
		{more, "Freeze\nPodSandboxConfig.added\nAdded.one\nAdded.two\n"},
	} {
		if got, err := newer(one.file); err != nil || got != one.want {
			t.Errorf("%s: got %q and %v, want %q", one.file, got, err, one.want)
		}
	}
}
