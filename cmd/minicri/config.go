package main

import (
	"errors"
	"fmt"
	"io"

	"github.com/minicri/minicri/internal/config"
)

// configCommand is "minicri config".
func configCommand(arguments []string, output io.Writer) error {
	switch {
	case len(arguments) == 1 && arguments[0] == "default":
		return config.Default().Write(output)
	case len(arguments) == 2 && arguments[0] == "check":
		if _, err := config.LoadFile(arguments[1]); err != nil {
			return fmt.Errorf("check %s: %w", arguments[1], err)
		}
		_, err := fmt.Fprintln(output, arguments[1], "is valid")
		return err
	default:
		return errors.New("usage: minicri config default, or minicri config check FILE")
	}
}
