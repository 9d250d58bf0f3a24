package main

import (
	"strings"

	"github.com/minicri/minicri/internal/config"
)

const fileHead = `# The configuration of minicri. Every key is a comment with its default. Set only the keys
# that you change: an update can then bring better defaults, and an older build can read
# the file. A key needs the line of its [table] above it.
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
