// Command manual writes what people read about minicri's commands and
// configuration, from internal/manual and internal/config:
//
//	manual configuration  docs/configuration.md
//	manual metrics        docs/metrics.md
//	manual man8           the manual page minicri(8)
//	manual man5           the manual page minicri.toml(5)
//	manual bash|zsh|fish  the completion of a shell
package main

import (
	"fmt"
	"io"
	"os"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "manual:", err)
		os.Exit(1)
	}
}

func run(arguments []string, output io.Writer) error {
	pages := map[string]func() string{
		"configuration": configuration, "metrics": metricsPage, "man8": programPage, "man5": filePage,
		"bash": bashCompletion, "zsh": zshCompletion, "fish": fishCompletion,
	}
	if len(arguments) != 1 || pages[arguments[0]] == nil {
		return fmt.Errorf("which page: configuration, metrics, man8, man5, bash, zsh or fish? Got %q", arguments)
	}
	_, err := io.WriteString(output, pages[arguments[0]]())
	return err
}
