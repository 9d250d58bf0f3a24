package main

import (
	"bytes"
	"context"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/minicri/minicri/internal/manual"
)

// What the usage text, the manual page and the completions say is what the
// program has.
func TestEveryCommandIsThere(t *testing.T) {
	for _, c := range manual.Commands() {
		// Too many arguments: each command says so, none does anything.
		arguments := append(strings.Fields(c.Words), "--help", "too", "many")
		err := command(context.Background(), arguments, &bytes.Buffer{})
		if err != nil && strings.Contains(err.Error(), "unknown") {
			t.Errorf("minicri %s: %v", c.Words, err)
		}
	}
	if err := command(context.Background(), []string{"no-such-command"}, &bytes.Buffer{}); err == nil || !strings.Contains(err.Error(), manual.Usage()) {
		t.Errorf("an unknown command: %v", err)
	}
}

// And the program has no command that the list does not have.
func TestEveryCommandIsInTheManual(t *testing.T) {
	source, err := os.ReadFile("main.go")
	if err != nil {
		t.Fatal(err)
	}
	cases := regexp.MustCompile(`(?m)^\tcase "([a-z]+)":`).FindAllStringSubmatch(string(source), -1)
	if len(cases) < 5 {
		t.Fatalf("main.go has the cases %q: this test does not find its commands any more", cases)
	}
	for _, found := range cases {
		if !slices.ContainsFunc(manual.Commands(), func(c manual.Command) bool { return strings.Fields(c.Words)[0] == found[1] }) {
			t.Errorf("minicri %s is not in internal/manual", found[1])
		}
	}
}

func TestImageFlagsAreInTheManual(t *testing.T) {
	var help bytes.Buffer
	_ = command(context.Background(), []string{"image", "--help"}, &help)
	var flags, listed []string
	for _, found := range regexp.MustCompile(`(?m)^  -([a-z-]+)`).FindAllStringSubmatch(help.String(), -1) {
		flags = append(flags, found[1])
	}
	for _, f := range manual.Find("image pull").Flags {
		listed = append(listed, f.Name)
	}
	slices.Sort(flags)
	slices.Sort(listed)
	if !slices.Equal(flags, listed) {
		t.Errorf("minicri image has the flags %q, the manual lists %q", flags, listed)
	}
}
