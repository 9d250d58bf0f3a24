package main

import (
	"strings"

	"github.com/minicri/minicri/internal/config"
)

const fileHead = `# The configuration of minicri. Every key is here as a comment, with its default: a file
# that sets only what it changes lets an update bring better defaults, and lets an older
# build read it. A key needs the line of its [table] above it.
# See minicri.toml(5); 'minicri config check FILE' checks a file.

`

// commentedFile is the default configuration with a '#' before each line that sets
// something.
func commentedFile() (string, error) {
	var all strings.Builder
	if err := config.Default().Write(&all); err != nil {
		return "", err
	}
	var b strings.Builder
	b.WriteString(fileHead)
	for line := range strings.Lines(all.String()) {
		if !strings.HasPrefix(line, "#") && strings.TrimSpace(line) != "" {
			b.WriteByte('#')
		}
		b.WriteString(line)
	}
	return b.String(), nil
}
