package main

import (
	"bytes"
	"os"
	"testing"
)

const root = "../.."

// The page is what the annotations of the tests say.
func TestPageIsCurrent(t *testing.T) {
	want, err := write(root)
	if err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(root + "/docs/cri.md")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Error("docs/cri.md is not current: run `make generate`")
	}
}

// Every RPC and every field has a test, or a note that says why it has none.
func TestEveryFieldHasATestOrAReason(t *testing.T) {
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
			t.Errorf("%s has no test, and no note that says why", name)
		}
	}
}
