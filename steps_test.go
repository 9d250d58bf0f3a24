package minicri_test

import (
	"os"
	"strings"
	"testing"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/sandbox"
)

// The documentation of a package names each of its steps, in the order of the list.
func TestDocumentationNamesTheSteps(t *testing.T) {
	for file, steps := range map[string][]step.Step{
		"sandbox/doc.go":   sandbox.Steps(),
		"container/doc.go": container.Steps(),
	} {
		data, err := os.ReadFile(file)
		must(t, err)
		text := string(data)
		for _, s := range steps {
			_, rest, found := strings.Cut(text, s.Name.Own())
			if !found {
				t.Errorf("%s does not name %s, or not in its place", file, s.Name)
				continue
			}
			text = rest
		}
	}
}
