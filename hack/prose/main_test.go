package main

import (
	"strings"
	"testing"
)

func TestRules(t *testing.T) {
	for _, c := range []struct{ name, file, text, finding string }{
		{"start of a page", "p.md", "What CNI ADD has made, DEL undoes.", "begin with the subject"},
		{"second sentence", "p.md", "It runs. Of these, two fail.", "begin with the subject"},
		{"after a label", "p.md", "- **Safe.** Where it fails, it stops.", "begin with the subject"},
		{"cell of a table", "p.md", "| a | b |\n| --- | --- |\n| c | Who waits, fails. |", "p.md:3:"},
		{"no full stop", "p.md", "- What a review found\n- The end", "begin with the subject"},
		{"genitive", "p.md", "It is on a disk of the kernel's, or not.", "repeat the noun"},
		{"required key", "p.md", "config: is missing", "is required"},
		{"question", "p.md", "What is it?", ""},
		{"over a line end", "p.md", "It shows what\nis left.", "name the thing"},
		{"code", "p.md", "Run `what is`.\n\n    what is\n\n```\nwhat is\n```\n", ""},
		{"what to do", "p.md", "It names the cause and what to do.", ""},
		{"relative clause", "p.md", "A pod, which runs", "make two sentences"},
		{"program that says", "p.md", "The log says why.", "programs return"},
		{"program that is told", "p.md", "The kubelet is told why.", "programs return"},
		{"required", "p.md", "The field is missing.", "is required"},
		{"missing plugin", "p.md", "A plugin is missing.", ""},
		{"test on a page for users", "docs/p.md", "It is `TestPod`.", "name of a test"},
		{"test on a page for developers", "CONTRIBUTING.md", "TestPod does.", ""},
		{"commit", "p.md", "Measured at 68d9a9f.", "commit"},
		{"ordinary words", "p.md", "The default added 20 faces for 10 GiB (v1, e2e).", ""},
		{"fragment", "p.go", "package p // of the pod", "begin with the subject"},
		{"directive", "p.go", "//go:build what\n\n// Package p holds that.\npackage p", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			findings := strings.Join(check(c.file, []byte(c.text)), "\n")
			if c.finding == "" && findings != "" || !strings.Contains(findings, c.finding) {
				t.Errorf("check returned %q, want %q", findings, c.finding)
			}
		})
	}
}
