package main

import (
	"flag"
	"fmt"
	"os"
	"slices"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/redact"
)

// look reads the configuration for a command that looks at a node: what is wrong with
// it is said, and keeps the command from nothing.
func look(arguments []string, more ...func(*flag.FlagSet)) (l *config.Loaded, words []string, err error) {
	if l, words, err = config.Read(arguments, os.Stderr, more...); err != nil {
		return nil, nil, usageError{err}
	}
	for _, problem := range slices.Concat(l.Unknown, l.Broken) {
		fmt.Fprintf(os.Stderr, "minicri: %s; this goes on without it\n", redact.Printable(problem.Error()))
	}
	_, _, err = newLogger(l.Config) // libraries log little
	return l, words, err
}
