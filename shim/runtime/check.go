package runtime

import (
	"context"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// Ask runs a program that may be another build of this one, with arguments from
// its name on, and returns what it says on both outputs. The file is its
// descriptor 3. When ctx ends, so does the program, with what it has started.
func (b *Builtin) Ask(ctx context.Context, program, file *os.File, arguments ...string) (said []byte, err error) {
	command := exec.CommandContext(ctx, "/proc/self/fd/4") // as it is in the child
	command.Args = arguments
	command.ExtraFiles = []*os.File{file, program}
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	command.Cancel = func() error { return syscall.Kill(-command.Process.Pid, syscall.SIGKILL) }
	command.WaitDelay = time.Second
	err = b.children.during(func() (err error) {
		said, err = command.CombinedOutput()
		return err
	})
	return said, err
}

// StartSelf starts this process's own program, whose descriptors are these in
// their order. End ends it.
func (b *Builtin) StartSelf(arguments []string, files []uintptr) (pid int, err error) {
	return b.children.own(func() (int, error) {
		return syscall.ForkExec("/proc/self/exe", arguments, &syscall.ProcAttr{Dir: "/", Env: os.Environ(), Files: files})
	})
}

// End kills a process of StartSelf and waits for its end.
func (b *Builtin) End(pid int) {
	_ = syscall.Kill(pid, syscall.SIGKILL) // it is ours until it has been waited for
	b.children.wait(pid)
}
