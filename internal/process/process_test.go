package process_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/test/harness"
)

// within is far more than anything here takes, also under the race detector on a busy machine.
const within = time.Minute

// A pid whose start time is another one belongs to another process by now.
func TestFactsNameOneProcess(t *testing.T) {
	facts := start(t, exec.Command("sleep", "60"))
	harness.Same(t, "what is opened", open(t, facts).Facts, facts)
	facts.StartTime++
	_, err := process.Open(facts)
	harness.Want(t, errors.Is(err, process.ErrGone), "Open = %v, want ErrGone", err)
	for _, pid := range []int{0, -1, 1 << 30} {
		_, err := process.Open(process.Facts{PID: pid, StartTime: 1})
		harness.Want(t, errors.Is(err, process.ErrGone), "Open of pid %d = %v, want ErrGone", pid, err)
	}
}

// Wait returns at the end of the process, and not because the poller has no room.
func TestWaitOutsideThePoller(t *testing.T) {
	facts := start(t, exec.Command("sleep", "60"))
	p, err := process.OpenOutsideThePoller(facts)
	harness.Check(t, err)
	begun, waited := make(chan struct{}), make(chan error, 1)
	go func() {
		close(begun)
		waited <- p.Wait()
	}()
	<-begun
	harness.Same(t, "returned before the end", len(waited), 0)
	harness.Check(t, unix.Kill(facts.PID, unix.SIGKILL))
	harness.Check(t, <-waited)
	stat, err := process.ReadStat(facts.PID)
	harness.Want(t, err == nil && stat.State == 'Z', "returned before the end: %+v, %v", stat, err)
	harness.Check(t, p.Close())
	harness.Want(t, p.Wait() != nil, "a closed one is waited for")
}

// endFirstThread in the environment makes a process of this program whose first thread has ended.
const endFirstThread = "MINICRI_TEST_END_FIRST_THREAD"

func init() {
	if os.Getenv(endFirstThread) == "" {
		return
	}
	runtime.LockOSThread() // init runs on the first thread; the others of Go's runtime stay
	_, _, _ = unix.Syscall(unix.SYS_EXIT, 0, 0, 0)
}

// A process runs as long as any of its threads does, also when its first one has ended, of which /proc says Z.
func TestEndOfTheFirstThread(t *testing.T) {
	command := exec.Command("/proc/self/exe")
	command.Env = append(os.Environ(), endFirstThread+"=1")
	facts := start(t, command)
	harness.Eventually(t, "its first thread has ended", func() bool {
		stat, err := process.ReadStat(facts.PID)
		harness.Check(t, err)
		return stat.State == 'Z'
	})
	open(t, facts)
}

func TestCloseEndsWait(t *testing.T) {
	p, err := process.Open(start(t, exec.Command("sleep", "60")))
	harness.Check(t, err)
	waited := make(chan error, 1)
	go func() { waited <- p.Wait() }()
	harness.Check(t, p.Close())
	harness.Want(t, <-waited != nil, "Wait says that the process ended, but the handle was only closed")
	stat, err := process.ReadStat(p.PID)
	harness.Want(t, err == nil && stat.State != 'Z', "the process did not survive Close: %+v, %v", stat, err)
}

// A process that has ended and was not reaped yet is gone, and stays openable unknown after it was reaped.
func TestReap(t *testing.T) {
	command := exec.Command("cat")
	stdin, err := command.StdinPipe()
	harness.Check(t, err)
	p := open(t, start(t, command))
	p.Reap()
	harness.Want(t, exists(p.PID), "Reap took a process that runs")
	harness.Check(t, errors.Join(stdin.Close(), p.Wait()))
	stat, err := process.ReadStat(p.PID)
	harness.Want(t, err == nil && stat.State == 'Z', "before Reap: %+v, %v, want a zombie", stat, err)
	_, err = process.Open(p.Facts)
	harness.Want(t, errors.Is(err, process.ErrGone), "Open of a zombie = %v, want ErrGone", err)
	p.Reap()
	harness.Want(t, !exists(p.PID), "still there after Reap")
	p.Reap()
	harness.Check(t, p.Wait())
}

func TestKill(t *testing.T) {
	p := open(t, start(t, exec.Command("sh", "-c", "trap '' TERM INT HUP; while :; do sleep 60; done")))
	for range 2 { // the second time it is gone already
		harness.Check(t, p.Kill(within))
	}
	harness.Want(t, !exists(p.PID), "still there after Kill")
}

// Kill cannot reap what is another one's child, and is done all the same.
func TestKillAnothersChild(t *testing.T) {
	parent := exec.Command("sh", "-c", "sleep 60 & echo $!; exec tail -f /dev/null")
	output, err := parent.StdoutPipe()
	harness.Check(t, err)
	start(t, parent)
	child := factsOf(t, readPID(t, output))
	p := open(t, child)
	harness.Check(t, p.Kill(within))
	stat, err := process.ReadStat(child.PID)
	harness.Want(t, err == nil && stat.State == 'Z', "%+v, %v: want a zombie that its parent does not reap", stat, err)
}

// The name of a process may look like the fields that follow it.
func TestReadStatOfAnOddName(t *testing.T) {
	sleep, err := exec.LookPath("sleep")
	harness.Check(t, err)
	odd := t.TempDir() + "/) Z 1 (x"
	data, err := os.ReadFile(sleep)
	harness.Check(t, errors.Join(err, os.WriteFile(odd, data, 0o755)))
	facts := start(t, exec.Command(odd, "60"))
	stat, err := process.ReadStat(facts.PID)
	harness.Need(t, err == nil, "ReadStat = %+v, %v", stat, err)
	harness.Want(t, stat.State != 'Z', "ReadStat = %+v, %v", stat, err)
	harness.Want(t, stat.Parent == os.Getpid(), "ReadStat = %+v, %v", stat, err)
	harness.Want(t, stat.StartTime != 0, "ReadStat = %+v, %v", stat, err)
	_, err = process.ReadStat(1 << 30)
	harness.Want(t, errors.Is(err, process.ErrGone), "ReadStat of a process that is not there = %v, want ErrGone", err)
}

// start starts a child that ends with the test at the latest.
func start(t *testing.T, command *exec.Cmd) process.Facts {
	harness.Check(t, command.Start())
	t.Cleanup(func() {
		_ = command.Process.Kill()
		_ = command.Wait() // an error where the test has reaped it
	})
	return factsOf(t, command.Process.Pid)
}

func factsOf(t *testing.T, pid int) process.Facts {
	stat, err := process.ReadStat(pid)
	harness.Check(t, err)
	return process.Facts{PID: pid, StartTime: stat.StartTime}
}

func open(t *testing.T, facts process.Facts) *process.Process {
	p, err := process.Open(facts)
	harness.Check(t, err)
	t.Cleanup(func() { _ = p.Close() })
	return p
}

func exists(pid int) bool {
	_, err := process.ReadStat(pid)
	return err == nil
}

// A page of the file is held, by a pipe, for longer than the kernel waits.
func TestAddWhileAPageIsHeld(t *testing.T) {
	fd, err := unix.MemfdCreate("seal", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	harness.Check(t, err)
	file := os.NewFile(uintptr(fd), "seal")
	defer file.Close()
	_, err = file.Write(make([]byte, os.Getpagesize()))
	harness.Check(t, err)
	reader, writer, err := os.Pipe()
	harness.Check(t, err)
	defer reader.Close()
	defer writer.Close()
	from := int64(0)
	_, err = unix.Splice(fd, &from, int(writer.Fd()), nil, os.Getpagesize(), 0)
	harness.Check(t, err)
	_, err = unix.FcntlInt(file.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_WRITE)
	harness.Need(t, err == unix.EBUSY, "the kernel seals a file with a page that is held: %v: this shows nothing", err)
	release := time.AfterFunc(500*time.Millisecond, func() { _, _ = reader.Read(make([]byte, os.Getpagesize())) })
	defer release.Stop()
	harness.Check(t, process.AddSeals(file, unix.F_SEAL_WRITE))
	_, err = file.WriteAt([]byte{1}, 0)
	harness.Want(t, err != nil, "it can be written")
}

func readPID(t *testing.T, from io.Reader) (pid int) {
	_, err := fmt.Fscan(from, &pid)
	harness.Check(t, err)
	return pid
}

// reaping runs the reaper of orphans for as long as the test takes.
func reaping(t *testing.T) {
	harness.Check(t, process.Adopt())
	meanwhile(t, func(ctx context.Context) { process.ReapOrphans(ctx, nil) })
}

// meanwhile runs what ends with its context, for as long as the test takes.
func meanwhile(t *testing.T, run func(context.Context)) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
}

// A grandchild whose parent has gone becomes ours, and when it ends, with
// no parent that waits for it, it is reaped; one that lives is left alone.
func TestReapOrphans(t *testing.T) {
	reaping(t)
	out, err := exec.Command("sh", "-c", `
		sleep 600 >/dev/null 2>&1 & echo $!
		sleep 60 >/dev/null 2>&1 & echo $!`).Output()
	harness.Check(t, err)
	output := strings.NewReader(string(out))
	short, long := open(t, factsOf(t, readPID(t, output))), open(t, factsOf(t, readPID(t, output)))
	t.Cleanup(func() { _ = long.Kill(within) })
	for _, orphan := range []*process.Process{short, long} {
		stat, err := process.ReadStat(orphan.PID)
		harness.Need(t, err == nil && stat.Parent == os.Getpid(), "an orphan has not been adopted: %+v, %v", stat, err)
	}
	began := time.Now()
	harness.Check(t, errors.Join(unix.Kill(short.PID, unix.SIGKILL), short.Wait()))
	harness.Want(t, exists(short.PID) || time.Since(began) >= process.ReapAfter, "reaped at once: another waiter would have had no time to")
	harness.Eventually(t, "the dead orphan is reaped", func() bool { return !exists(short.PID) })
	stat, err := process.ReadStat(long.PID)
	harness.Want(t, err == nil && stat.State != 'Z', "the orphan that lives: %+v, %v", stat, err)
}

// The exit status of a child that other code waits for is never taken from it,
// however many children end at once and whatever orphans end beside them.
func TestReapOrphansLeavesChildrenToTheirWaiters(t *testing.T) {
	reaping(t)
	out, err := exec.Command("sh", "-c", "sleep 0.01 >/dev/null 2>&1 & echo $!").Output()
	harness.Check(t, err)
	first := readPID(t, strings.NewReader(string(out)))
	for n := 0; exists(first) || n < 200; n++ { // until orphans are reaped
		status := n % 200
		command := exec.Command("sh", "-c", fmt.Sprintf("sleep 0.01 >/dev/null 2>&1 & exit %d", status))
		err := command.Run()
		var exit *exec.ExitError
		switch {
		case status == 0 && err != nil:
			t.Fatalf("run %d: %v", n, err)
		case status != 0 && (!errors.As(err, &exit) || exit.ExitCode() != status):
			t.Fatalf("run %d: %v, want exit status %d", n, err, status)
		}
	}
	harness.Eventually(t, "every orphan is reaped", func() bool {
		return !slices.ContainsFunc(process.Children("self"), func(pid int) bool {
			stat, err := process.ReadStat(pid)
			return err == nil && stat.State == 'Z'
		})
	})
}

func run(t *testing.T) *process.Parent {
	c, err := process.NewParent()
	harness.Check(t, err)
	meanwhile(t, c.Run)
	return c
}

// shell starts a shell with its output in a pipe.
func shell(t *testing.T, c *process.Parent, script string) (*process.Child, *os.File) {
	r, w, err := os.Pipe()
	harness.Check(t, err)
	t.Cleanup(func() { _ = r.Close() })
	child, err := c.Start(func() (int, error) {
		return syscall.ForkExec("/bin/sh", []string{"sh", "-c", script}, &syscall.ProcAttr{Files: []uintptr{0, w.Fd(), 2}})
	}, nil)
	_ = w.Close()
	harness.Check(t, err)
	return child, r
}

// A process that a child of ours has made, and that ends before its parent does.
func TestOwnedBeforeItsParentEnds(t *testing.T) {
	c := run(t)
	parent, out := shell(t, c, `sh -c 'sleep 0.1; exit 7' & echo $!; exec sleep 1000`)
	pid := readPID(t, out)
	seen := make(chan string, 1)
	child, err := c.Own(pid, func(int) {
		stat, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
		seen <- string(stat)
	})
	harness.Check(t, err)
	_, err = c.Own(pid, nil)
	harness.Want(t, err != nil, "a second owner")
	harness.Eventually(t, "it has ended", func() bool {
		stat, err := process.ReadStat(pid)
		return err == nil && stat.State == 'Z'
	})
	harness.Same(t, "ends that are told while its parent lives", len(seen), 0)
	harness.Check(t, syscall.Kill(parent.PID, syscall.SIGKILL))
	status := child.Wait()
	harness.Want(t, status.ExitStatus() == 7, "status %v, want exit code 7", status)
	stat := <-seen
	harness.Want(t, strings.Contains(stat, ") Z "), "before it was reaped it was %q, no zombie", stat)
}

// Orphans are reaped, also beside a child that nobody waits for.
func TestOrphansAreReaped(t *testing.T) {
	c := run(t)
	_, _ = shell(t, c, "exit 1")
	_, out := shell(t, c, `(sleep 0.1; exit 3) & echo $!`)
	orphan := readPID(t, out)
	harness.Eventually(t, "the orphan is reaped", func() bool { return !exists(orphan) })
}

// A pid that is not listed again after the process is opened may be that of another process by now.
//
// attack: denial of service: a container has its pids reused by processes of the node while it is killed on cgroup v1
// held: signals go by pidfd to processes that are still listed after they were opened
func TestSignalsReachOnlyWhatIsListedTwice(t *testing.T) {
	stays, other := exec.Command("sleep", "1000"), exec.Command("sleep", "1000")
	harness.Check(t, errors.Join(stays.Start(), other.Start()))
	pids := []int{stays.Process.Pid, other.Process.Pid, 0}
	sent, err := process.SignalListed(pids, func() ([]int, error) { return pids[:1], nil }, syscall.SIGKILL)
	harness.Want(t, err == nil && slices.Equal(sent, pids[:1]), "signalled %v, %v", sent, err)
	_ = stays.Wait()
	harness.Check(t, errors.Join(other.Process.Signal(syscall.Signal(0)), other.Process.Kill()))
	_ = other.Wait()
}
