package main

import (
	"fmt"
	"io"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/internal/manual"
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
	case len(arguments) == 2 && arguments[0] == "from-containerd":
		return fromContainerd(arguments[1], output)
	default:
		return fmt.Errorf("usage:\n%s", manual.UsageOf("config"))
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
