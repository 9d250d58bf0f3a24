// Package isolate runs the tests of a package in namespaces of their own: the
// links, rules and mounts that they make must not reach the machine.
package isolate

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// inside is set in the test process that has namespaces of its own.
const inside = "MINICRI_TEST_ISOLATED"

// Run is m.Run in a process with a network and a mount namespace of its own, in which prepare is called first if it
// is not nil. It returns the exit code, for TestMain. It needs root.
func Run(m *testing.M, prepare func() error) int {
	if os.Getenv(inside) == "" {
		return runInside()
	}
	if prepare != nil {
		if err := prepare(); err != nil {
			return failed(err)
		}
	}
	return m.Run()
}

func runInside() int {
	command := exec.Command("/proc/self/exe", os.Args[1:]...)
	command.Env = append(os.Environ(), inside+"=1")
	command.Stdin, command.Stdout, command.Stderr = os.Stdin, os.Stdout, os.Stderr
	command.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS, Pdeathsig: unix.SIGKILL}
	err := command.Run()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		return max(exit.ExitCode(), 1)
	case err != nil:
		return failed(fmt.Errorf("these tests need root, to make namespaces: %w", err))
	}
	return 0
}

func failed(err error) int {
	fmt.Fprintln(os.Stderr, err)
	return 1
}
