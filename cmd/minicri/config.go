package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"reflect"
	"slices"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/containerd"
	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/internal/manual"
	"github.com/minicri/minicri/internal/redact"
)

func configCommand(ctx context.Context, arguments []string, output io.Writer) error {
	if len(arguments) == 0 {
		return misused("config: default, check or show? `minicri help config`")
	}
	l, words, err := config.Read(arguments[1:], output)
	if err != nil {
		return usageError{err}
	}
	switch verb := arguments[0]; {
	case verb == "default" && len(words) == 0:
		return config.Default().Write(output)
	case verb == "check" && len(words) <= 1:
		flags := arguments[1:]
		if len(words) == 1 {
			flags = slices.Concat(flags, []string{"--config", words[0]})
		}
		return checkConfig(ctx, flags, output)
	case verb == "show" && len(words) == 0:
		running, err := runningConfig(ctx, l.Socket)
		if err != nil {
			return fmt.Errorf("ask the daemon for its configuration: %w", err)
		}
		return errors.Join(showConfig(output, l, running), l.Strict())
	case verb == "from-containerd" && len(words) == 1:
		data, err := os.ReadFile(words[0])
		if err != nil {
			return fmt.Errorf("read containerd's configuration: %w", err)
		}
		text, err := containerd.Convert(data)
		if err != nil {
			return fmt.Errorf("%s: %w", words[0], err)
		}
		_, err = output.Write(text)
		return err
	default:
		return misused("usage: minicri config default, config check [FILE], config show or config from-containerd FILE")
	}
}

// checkConfig reports what a daemon with these flags would refuse on this machine, and unknown keys.
func checkConfig(ctx context.Context, flags []string, output io.Writer) error {
	l, _, err := config.Read(flags, output)
	if err != nil {
		return usageError{err}
	}
	m, err := machine.Read(l.Root)
	if err != nil {
		return err
	}
	running, err := runningConfig(ctx, l.Socket)
	if err != nil {
		running = map[string]any{} // one serves, and does not say what
	}
	problems := slices.Concat(preflight(l.Config, m), obstacles(ctx, l.Config, running))
	if _, err := findShim(l.Shim); err != nil {
		problems = append(problems, fmt.Errorf("shim: %w", err))
	}
	file := config.File(flags)
	if err := errors.Join(l.Strict(), errors.Join(located(l, problems)...)); err != nil {
		return fmt.Errorf("%s is not good:\n%w", file, err)
	}
	if _, err := os.Stat(file); errors.Is(err, os.ErrNotExist) { // no flag names it
		file = "the configuration without " + file
	}
	_, err = fmt.Fprintln(output, file, "is valid")
	return err
}

// showConfig prints each value and its source. running is from runningConfig.
func showConfig(output io.Writer, l *config.Loaded, running map[string]any) error {
	document, err := json.Marshal(l.Config)
	if err != nil {
		return err
	}
	now, err := keysIn(document)
	if err != nil {
		return err
	}
	for _, v := range l.Values() {
		source := v.Source
		if running != nil && !reflect.DeepEqual(running[v.Name], now[v.Name]) {
			source += fmt.Sprintf("; the daemon that runs has %v: by a flag of its own, or until it reads this or is restarted", running[v.Name])
		}
		if _, err := fmt.Fprintf(output, "%s = %s  # %s\n", v.Name, redact.Line(v.Text), redact.Line(source)); err != nil {
			return err
		}
	}
	return nil
}

type call struct {
	*config.Loaded
	words []string
	flags *flag.FlagSet
}

func (c call) text(flag string) string { return c.flags.Lookup(flag).Value.String() }
func (c call) has(flag string) bool    { return c.text(flag) == "true" }

// look reads the configuration. It reports what is wrong with it, and the command goes on.
func look(command string, arguments []string) (c call, err error) {
	c.Loaded, c.words, err = config.Read(arguments, os.Stderr, func(set *flag.FlagSet) {
		manual.Flags(command, set)
		c.flags = set
	})
	if err != nil {
		return c, usageError{err}
	}
	for _, problem := range slices.Concat(c.Unknown, c.Broken) {
		fmt.Fprintf(os.Stderr, "minicri: %s; this goes on without it\n", redact.Line(problem.Error()))
	}
	_, _, err = newLogger(c.Config) // libraries log little
	return c, err
}
