package container

import (
	"fmt"
	"runtime"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// startAdvice returns what to do about a start that failed, or "" for an unknown failure. Errors of the kernel and of
// runtimes name only what was refused.
func startAdvice(spec *specs.Spec, failure string) string {
	has := func(words ...string) bool {
		for _, word := range words {
			if !strings.Contains(failure, word) {
				return false
			}
		}
		return true
	}
	switch {
	case has(" hook #"):
		return hookAdvice(spec, failure)
	case has("exec format error"):
		return "the file is a script without #! in its first line, or a program for another architecture than " +
			runtime.GOARCH
	case has("executable file not found"), has(`exec: ""`):
		return "check the command, and the variable PATH of the image and the container"
	case has("OOM-killed"), has("unable to set memory limit"), has("memory.max"), has("memory.limit_in_bytes"):
		return "raise the container's memory limit" + memoryLimit(spec)
	case has("error mounting", "not a directory"):
		return "a directory cannot be mounted over a file, nor a file over a directory: check the mount's paths"
	case has("error mounting", "no such file or directory"):
		return "the source of the mount does not exist on the node"
	case has("chdir to cwd"), has("init: mkdir "):
		return "check the working directory: the user has to be able to enter it"
	case has("exec: ", "no such file or directory"):
		return "the image has no such file, and no mount adds it"
	case has("exec ", "no such file or directory"):
		return "the file exists, but the image lacks its interpreter: the program after #!, or the dynamic linker"
	case has("exec", "is a directory"):
		return "the command is a directory: name a program in it"
	case has("exec", "permission denied"):
		return "the file has no execute permission for the user, or it is on a mount with noexec"
	}
	return ""
}

func memoryLimit(spec *specs.Spec) string {
	if r := spec.Linux.Resources; r != nil && r.Memory != nil && r.Memory.Limit != nil {
		return fmt.Sprintf(", %d bytes: its start takes more", *r.Memory.Limit)
	}
	return ""
}

// hookAdvice names the program of a hook, which runtimes number.
func hookAdvice(spec *specs.Spec, failure string) string {
	if spec.Hooks == nil {
		return ""
	}
	for kind, hooks := range map[string][]specs.Hook{
		"prestart":      spec.Hooks.Prestart, //nolint:staticcheck // deprecated, and still in use
		"createRuntime": spec.Hooks.CreateRuntime, "createContainer": spec.Hooks.CreateContainer,
		"startContainer": spec.Hooks.StartContainer,
	} {
		for i, hook := range hooks {
			if strings.Contains(failure, fmt.Sprintf("%s hook #%d:", kind, i)) {
				return "the hook is " + hook.Path
			}
		}
	}
	return ""
}
