package main

import (
	"os"
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
