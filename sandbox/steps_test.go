package sandbox

import (
	"os"
	"strings"
	"testing"
)

// The package's documentation names every step, in the order of the list.
func TestDocumentationNamesTheSteps(t *testing.T) {
	data, err := os.ReadFile("doc.go")
	if err != nil {
		t.Fatal(err)
	}
	text := string(data)
	for _, s := range Steps() {
		_, rest, found := strings.Cut(text, s.Name.Own())
		if !found {
			t.Errorf("doc.go does not name %s, or not in its place", s.Name)
			continue
		}
		text = rest
	}
}
