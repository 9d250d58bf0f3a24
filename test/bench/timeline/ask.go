package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/minicri/minicri/test/bench/contender"
	"github.com/minicri/minicri/test/bench/node"
)

// measure prints how long `minicri timeline NAME` takes for each name: the daemon is
// asked, and the files are read as they are when none runs. What a busy machine adds
// shows in `minicri version`, which only starts and ends, and in how much of the time
// was CPU time of the command and of the daemon.
func measure(ctx context.Context, binaries string, n *node.Node, names ...string) error {
	// A directory without the socket of a daemon, for a look at the same files.
	files := filepath.Join(n.Dir, "files")
	if err := errors.Join(os.Mkdir(files, 0o700), os.Symlink(filepath.Join(n.Config.State, "facts"), filepath.Join(files, "facts"))); err != nil {
		return err
	}
	config := filepath.Join(n.Dir, "config.toml")
	commands := [][]string{{"version"}}
	for _, name := range names {
		commands = append(commands, []string{"timeline", name, "--config", config})
	}
	for _, name := range names {
		commands = append(commands, []string{"timeline", name + " (files)", "--config", config, "--state", files})
	}
	for _, arguments := range commands {
		if err := measureOne(ctx, n, filepath.Join(binaries, "minicri"), arguments); err != nil {
			return err
		}
	}
	return nil
}

func measureOne(ctx context.Context, n *node.Node, program string, arguments []string) error {
	shown := strings.Join(arguments[:min(2, len(arguments))], " ")
	for i, argument := range arguments {
		arguments[i] = strings.TrimSuffix(argument, " (files)")
	}
	var took []time.Duration
	before, err := contender.CPU(n.PID())
	if err != nil {
		return err
	}
	used := -before
	for range asked {
		command := exec.CommandContext(ctx, program, arguments...)
		began := time.Now()
		if out, err := command.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", command, err, out)
		}
		took = append(took, time.Since(began))
		used += command.ProcessState.UserTime() + command.ProcessState.SystemTime()
	}
	after, err := contender.CPU(n.PID())
	if err != nil {
		return err
	}
	used += after
	fmt.Printf("minicri %-30s median of %d: %6.1f ms, the slowest %.1f ms, CPU time %.1f ms (goal 50)\n", shown, asked,
		contender.Milliseconds(contender.Quantile(took, .5)), contender.Milliseconds(slices.Max(took)), contender.Milliseconds(used/asked))
	return nil
}
