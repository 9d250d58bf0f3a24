// Command manual writes what people read about minicri's commands and
// configuration, from internal/manual and internal/config:
//
//	manual configuration  docs/configuration.md
//	manual metrics        docs/metrics.md
//	manual man8           the manual page minicri(8)
//	manual man5           the manual page minicri.toml(5)
//	manual share DIR      what is installed below share/: pages, completions of shells,
//	                      and config.toml, every key as a comment
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "manual:", err)
		os.Exit(1)
	}
}

func run(arguments []string, output io.Writer) error {
	if len(arguments) == 2 && arguments[0] == "share" {
		return share(arguments[1])
	}
	pages := map[string]func() string{
		"configuration": configuration, "metrics": metricsPage, "man8": programPage, "man5": filePage,
	}
	if len(arguments) != 1 || pages[arguments[0]] == nil {
		return fmt.Errorf("which page: configuration, metrics, man8, man5, or share DIR? Got %q", arguments)
	}
	_, err := io.WriteString(output, pages[arguments[0]]())
	return err
}

func share(directory string) error {
	file, err := commentedFile()
	if err != nil {
		return err
	}
	var bash, zsh, fish strings.Builder
	err = errors.Join(
		program.GenBashCompletionV2(&bash, true),
		program.GenZshCompletion(&zsh),
		program.GenFishCompletion(&fish, true),
	)
	if err != nil {
		return fmt.Errorf("write the completions: %w", err)
	}
	for name, text := range map[string]string{
		"man/man8/minicri.8":                     programPage(),
		"man/man5/minicri.toml.5":                filePage(),
		"bash-completion/completions/minicri":    bash.String(),
		"zsh/site-functions/_minicri":            zsh.String(),
		"fish/vendor_completions.d/minicri.fish": fish.String(),
		"config.toml":                            file,
	} {
		path := filepath.Join(directory, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}
