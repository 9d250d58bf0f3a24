package container

import (
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/minicri/minicri/test/harness"
)

// The failures are texts of libcontainer, of its init, of runc and crun, and of a launch.
func TestStartAdvice(t *testing.T) {
	const unable = "unable to start container process: error during container init: "
	spec := &specs.Spec{
		Hooks: &specs.Hooks{CreateRuntime: []specs.Hook{{Path: "/opt/first"}, {Path: "/opt/second"}}},
		Linux: &specs.Linux{Resources: &specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: new(int64(204800))}}},
	}
	for _, test := range []struct{ failure, advice string }{
		{"exec /wrong: exec format error", "script without #! in its first line, or a program"},
		{unable + `exec: "nosuch": executable file not found in $PATH`, "PATH"},
		{unable + `exec: "": executable file not found in $PATH`, "check the command"},
		{unable + `exec: "/no/such": stat /no/such: no such file or directory`, "no such file"},
		{"exec /bad/nointerp: no such file or directory", "interpreter"},
		{unable + `exec: "/etc/passwd": permission denied`, "no execute permission"},
		{unable + `exec: "/etc": is a directory`, "is a directory"},
		{"container init was OOM-killed (memory limit too low?)", "memory limit, 204800 bytes"},
		{"error setting cgroup config: unable to set memory limit to 204800 (current usage: 1)", "204800"},
		{`error mounting "/tmp" to rootfs at "/etc/passwd": mount src=/tmp: not a directory`, "over a file"},
		{unable + `error mounting "/gone" to rootfs at "/x": no such file or directory`, "does not exist on the node"},
		{unable + `error running createRuntime hook #1: exit status 1, stdout: , stderr: `, "the hook is /opt/second"},
		{`chdir to cwd ("/etc/passwd") set in config.json failed: not a directory`, "working directory"},
		{unable + "mkdir /etc/passwd: not a directory", "working directory"},
		{"something else", ""},
	} {
		got := startAdvice(spec, test.failure)
		fits := strings.Contains(got, test.advice) && (got == "") == (test.advice == "")
		harness.Want(t, fits, "%s: %q", test.failure, got)
	}
}
