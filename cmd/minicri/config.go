package main

import (
	"errors"
	"fmt"
	"io"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/machine"
)

// configCommand is "minicri config".
func configCommand(arguments []string, output io.Writer) error {
	switch {
	case len(arguments) == 1 && arguments[0] == "default":
		return config.Default().Write(output)
	case len(arguments) == 2 && arguments[0] == "check":
		if err := checkConfig(arguments[1]); err != nil {
			return fmt.Errorf("check %s: %w", arguments[1], err)
		}
		_, err := fmt.Fprintln(output, arguments[1], "is valid")
		return err
	default:
		return errors.New("usage: minicri config default, or minicri config check FILE")
	}
}

// checkConfig checks what the daemon would refuse at its start, but for what this
// machine cannot do.
func checkConfig(file string) error {
	c, err := config.LoadFile(file)
	if err != nil {
		return err
	}
	defaults, err := readDefaults(c, machine.Machine{CgroupDelegation: true})
	if err != nil {
		return err
	}
	_, err = handlerDefaults(c, defaults)
	return err
}
