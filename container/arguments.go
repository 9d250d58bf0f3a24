package container

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/minicri/minicri/oci"
)

// What execve(2) takes (binfmts.h, exec.c of the kernel): each string, with its
// end, and all of them with their pointers. The whole may be a quarter of the
// stack's limit, within these bounds.
const (
	longestArgument = 32 * 4096
	leastArguments  = 32 * 4096
	mostArguments   = 6 << 20
	pointer         = 8
)

// checkArguments refuses a command and an environment that no program could be
// executed with, before anything of them is written.
func checkArguments(c *oci.Container) error {
	args, env, err := oci.Arguments(c)
	if err != nil {
		return err
	}
	stack, err := oci.StackLimit(c)
	if err != nil {
		return err
	}
	return checkStrings(args, env, stack, "config.command, args and envs, with those of the image")
}

// checkExec is checkArguments for a command in a container that is there, whose
// environment was checked when it was made.
func checkExec(p *specs.Process) error {
	return checkStrings(p.Args, nil, oci.SoftStack(p.Rlimits), "cmd")
}

// checkStrings is for a process with this limit of its stack, in bytes. all is
// what an error calls args and env together.
func checkStrings(args, env []string, stack uint64, all string) error {
	limit := min(mostArguments, max(leastArguments, stack/4))
	total := uint64(0)
	for _, list := range [][]string{args, env} {
		for i, word := range list {
			if strings.ContainsRune(word, 0) {
				return fmt.Errorf("%s: has a NUL character: %w", what(args, list, i), errdefs.ErrInvalidArgument)
			}
			if !utf8.ValidString(word) {
				return fmt.Errorf("%s: is not UTF-8, and a runtime-spec, which is JSON, cannot carry it: %w", what(args, list, i), errdefs.ErrInvalidArgument)
			}
			if len(word) >= longestArgument {
				return fmt.Errorf("%s: %d bytes in one string, execve(2) takes less than %d: %w", what(args, list, i), len(word), longestArgument, errdefs.ErrInvalidArgument)
			}
			total += uint64(len(word)) + 1 + pointer
		}
	}
	if total > limit {
		return fmt.Errorf("%s: %d bytes together, execve(2) takes %d: %w", all, total, limit, errdefs.ErrInvalidArgument)
	}
	return nil
}

// what names a string, without its value, which may be a secret.
func what(args, list []string, i int) string {
	if len(args) > 0 && &list[0] == &args[0] {
		return fmt.Sprintf("argument %d of the command", i)
	}
	return "environment variable " + oci.VariableName(list[i])
}
