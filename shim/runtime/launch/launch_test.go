package launch

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// launch runs a list and returns how the process ended, and its answer.
func launch(t *testing.T, c *Calls, kill bool) (state *os.ProcessState, answer error) {
	t.Helper()
	elf, err := Program()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "launch")
	if err := os.WriteFile(path, elf, 0o755); err != nil {
		t.Fatal(err)
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	file, theirs := os.NewFile(uintptr(fds[0]), "ours"), os.NewFile(uintptr(fds[1]), "theirs")
	ours, err := net.FileConn(file)
	if err := errors.Join(err, file.Close()); err != nil {
		t.Fatal(err)
	}
	defer ours.Close()
	p, err := os.StartProcess(path, []string{Name}, &os.ProcAttr{Files: []*os.File{nil, nil, nil, theirs}})
	if err := errors.Join(err, theirs.Close()); err != nil {
		t.Fatal(err)
	}
	if kill {
		err = p.Kill()
	} else {
		_, err = c.WriteTo(ours)
	}
	if err != nil {
		t.Fatal(err)
	}
	answer = c.ReadAnswer(ours)
	state, err = p.Wait()
	if err != nil {
		t.Fatal(err)
	}
	return state, answer
}

func TestCallsAreMadeInOrder(t *testing.T) {
	written := filepath.Join(t.TempDir(), "written")
	var c Calls
	at := ^uint64(100) + 1 // AT_FDCWD
	c.Keep("make a file", unix.SYS_OPENAT, at, c.String(written), unix.O_CREAT|unix.O_WRONLY, 0o600)
	c.Use("write it", unix.SYS_WRITE, c.String("one"), 3)
	c.Try("close nothing", unix.SYS_CLOSE, 1000)
	c.Use("write more", unix.SYS_WRITE, c.String("two"), 3)
	c.Add("report", unix.SYS_WRITE, Socket, c.String("r"), 1)
	c.Add("execute a program", unix.SYS_EXECVE, c.String("/bin/sh"), c.Strings([]string{"sh", "-c", `exit "$CODE"`}), c.Strings([]string{"CODE=7"}))
	state, answer := launch(t, &c, false)
	if answer != nil || state.ExitCode() != 7 {
		t.Errorf("answer %v, %v; want none and the program's exit code, 7", answer, state)
	}
	if content, err := os.ReadFile(written); err != nil || string(content) != "onetwo" {
		t.Errorf("%q, %v", content, err)
	}
}

// Calls that are made only if the one before did not fail.
func TestCallsAreLeftOutAfterOneThatFailed(t *testing.T) {
	var c Calls
	at := ^uint64(100) + 1 // AT_FDCWD
	for _, program := range []string{"/nowhere/sh", "/bin/sh", "/bin/false"} {
		path := c.String(program)
		c.If(2, "find "+program, unix.SYS_FACCESSAT, at, path, unix.X_OK)
		c.Add("close the socket with the exec", unix.SYS_FCNTL, Socket, unix.F_SETFD, unix.FD_CLOEXEC)
		c.Add("execute "+program, unix.SYS_EXECVE, path, c.Strings([]string{"sh", "-c", "exit 7"}), c.Strings(nil))
	}
	state, answer := launch(t, &c, false)
	if !errors.Is(answer, ErrEnded) || state.ExitCode() != 7 {
		t.Errorf("answer %v, %v; want none and the exit code of the program that is there, 7", answer, state)
	}
}

// The first call that fails ends it, and is named; none after it is made.
func TestCallThatFailsIsNamed(t *testing.T) {
	made := filepath.Join(t.TempDir(), "made")
	var c Calls
	c.Add("set the umask", unix.SYS_UMASK, 0)
	c.Add("enter /nowhere", unix.SYS_CHDIR, c.String("/nowhere"))
	c.Add("make a directory", unix.SYS_MKDIRAT, ^uint64(100)+1, c.String(made), 0o700)
	state, answer := launch(t, &c, false)
	if !errors.Is(answer, syscall.ENOENT) || !strings.Contains(answer.Error(), "enter /nowhere") || state.Success() {
		t.Errorf("answer %v, %v", answer, state)
	}
	if _, err := os.Stat(made); !os.IsNotExist(err) {
		t.Errorf("it went on after the failure: %v", err)
	}
}

// A list that ends without an execve is a failure, too.
func TestListWithoutAProgram(t *testing.T) {
	var c Calls
	c.Add("set the umask", unix.SYS_UMASK, 0)
	if state, answer := launch(t, &c, false); answer == nil || state.Success() {
		t.Errorf("answer %v, %v", answer, state)
	}
}

func TestKilled(t *testing.T) {
	if _, answer := launch(t, new(Calls), true); !errors.Is(answer, ErrEnded) {
		t.Errorf("answer %v", answer)
	}
}

func TestTooLongAList(t *testing.T) {
	var c Calls
	c.Bytes(make([]byte, mostData+1))
	if _, err := c.WriteTo(new(strings.Builder)); err == nil {
		t.Error("no error")
	}
}
