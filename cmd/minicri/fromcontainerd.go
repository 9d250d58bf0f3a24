package main

import (
	"fmt"
	"io"
	"os"

	"github.com/minicri/minicri/internal/containerd"
)

// fromContainerd is "minicri config from-containerd": the file of minicri is printed.
func fromContainerd(file string, output io.Writer) error {
	data, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("read containerd's configuration: %w", err)
	}
	text, err := containerd.Convert(data)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	_, err = output.Write(text)
	return err
}
