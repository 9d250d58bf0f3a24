package runner

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/test/harness"
)

// within is far more than anything here takes, on a busy machine too.
const within = time.Minute

// parents are a cgroup in each kind of hierarchy that this machine has.
func parents(t testing.TB) map[string]cgroup.Group {
	path := fmt.Sprintf("/minicri-unit-runner-%d-%d", os.Getpid(), time.Now().UnixNano())
	found := make(map[string]cgroup.Group)
	parent, err := cgroup.GroupParent(path)
	harness.Check(t, err)
	found[fmt.Sprintf("v2=%v", parent.V2)] = parent
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup"))
	harness.Check(t, err)
	for _, m := range mounts {
		if strings.Contains(m.VFSOptions, "pids") {
			found["v2=false"] = cgroup.Group{Dir: filepath.Join(m.Mountpoint, path)}
		}
	}
	for _, parent := range found {
		harness.Check(t, parent.Make())
		t.Cleanup(func() { harness.Check(t, errors.Join(parent.Kill(within), parent.Remove())) })
	}
	return found
}

// scene is a runner and a directory of plugins, which are shell scripts.
type scene struct {
	*Runner
	bin string
}

// eachVersion runs a test in each kind of hierarchy.
func eachVersion(t *testing.T, scripts map[string]string, test func(t *testing.T, s scene)) {
	for name, parent := range parents(t) {
		t.Run(name, func(t *testing.T) {
			s := scene{bin: t.TempDir()}
			for name, script := range scripts {
				harness.Check(t, os.WriteFile(filepath.Join(s.bin, name), []byte("#!/bin/sh\n"+script), 0o755))
			}
			var err error
			s.Runner, err = Open(parent, "unit-")
			harness.Check(t, err)
			test(t, s)
		})
	}
}

// call runs a plugin of the run's chain as libcni does.
func (s scene) call(t *testing.T, run *Run, plugin, stdin string) (string, error) {
	path, err := run.FindInPath(plugin, []string{s.bin})
	harness.Check(t, err)
	out, err := run.ExecPlugin(t.Context(), path, []byte(stdin), []string{"PATH=" + os.Getenv("PATH"), "CNI_COMMAND=" + run.Verb, "CNI_PATH=" + s.bin, "KEPT=yes"})
	return string(out), err
}

func (s scene) begin(t *testing.T, verb string, plugins int) *Run {
	run, err := s.Begin(Request{Verb: verb, ID: "web", Network: "net", Plugins: plugins, Limit: within})
	harness.Check(t, err)
	t.Cleanup(func() { _ = errors.Join(run.Kill(within), run.End()) })
	return run
}

func alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(stat), ") Z ")
}

// A plugin gets its own path, its input and its environment, and what it says comes out, large or small.
func TestPluginRunsAsItself(t *testing.T) {
	scripts := map[string]string{
		"echo": `echo "$0 $KEPT $CNI_COMMAND"; echo words >&2; cat`,
		"big":  `head -c 1000000 /dev/zero | tr '\0' x`,
	}
	eachVersion(t, scripts, func(t *testing.T, s scene) {
		run := s.begin(t, "CHECK", 2)
		out, err := s.call(t, run, "echo", "its input")
		want := filepath.Join(s.bin, "echo") + " yes CHECK\nits input"
		harness.Want(t, err == nil && out == want, "%q, %v, want %q", out, err, want)
		out, err = s.call(t, run, "big", "")
		harness.Need(t, err == nil && len(out) == 1000000, "%d bytes, %v", len(out), err)
		harness.Want(t, strings.Trim(out, "x") == "", "%d bytes, %v", len(out), err)
		all := run.Reports()
		harness.Need(t, len(all) == 2, "reports %+v", all)
		harness.Want(t, all[0].Name == "echo", "reports %+v", all)
		harness.Want(t, all[0].Verb == "CHECK", "reports %+v", all)
		harness.Want(t, all[0].Stderr == "words\n", "reports %+v", all)
		harness.Want(t, !all[0].Failed(), "reports %+v", all)
		harness.Want(t, all[1].Name == "big", "reports %+v", all)
		harness.Want(t, all[1].Took > 0, "reports %+v", all)
		harness.Check(t, run.Verdict())
		harness.Want(t, !run.Running(), "the run is not over")
	})
}

// A signal that a plugin sends to its process group, as "trap 'kill 0' EXIT" of many
// shell scripts does, reaches nothing but the run: the plugin is in a session of its own.
func TestPluginThatSignalsItsGroup(t *testing.T) {
	// Caught here, no program that is started ignores it (execve(2)), as under nohup.
	caught := make(chan os.Signal, 1)
	signal.Notify(caught, syscall.SIGHUP)
	defer signal.Stop(caught)
	for _, name := range []string{"TERM", "HUP", "STOP"} {
		scripts := map[string]string{"rude": "ps -o sid= -p $$ >$(dirname $0)/session; (sleep 0.2; kill -CONT -$$) & kill -" + name + " 0; echo '{}'"}
		eachVersion(t, scripts, func(t *testing.T, s scene) {
			run := s.begin(t, "ADD", 1)
			other := exec.Command("sleep", "600") // of our process group
			harness.Check(t, other.Start())
			defer func() { _, _ = other.Process.Kill(), other.Wait() }()
			if name == "STOP" {
				go func() { // a plugin that has stopped itself is ended at the limit
					harness.Eventually(t, "it has stopped itself", func() bool {
						session, _ := os.ReadFile(filepath.Join(s.bin, "session")) // it may not be there yet
						leader, err := strconv.Atoi(strings.TrimSpace(string(session)))
						return err == nil && process.HasStopped(leader)
					})
					_ = run.Kill(within)
				}()
			}
			_, err := s.call(t, run, "rude", "")
			harness.Want(t, err != nil, "the plugin lived through its own signal")
			harness.Want(t, alive(other.Process.Pid), "the signal reached the process group of the daemon")
			session := harness.Read(t, filepath.Join(s.bin, "session"))
			ours, _ := unix.Getsid(0)
			harness.Want(t, strings.TrimSpace(string(session)) != strconv.Itoa(ours), "the plugin is in the daemon's session")
		})
	}
}

// A plugin has signals as they are by default and the daemon's own umask, nice and
// limits, as a plugin that containerd runs.
func TestPluginHasTheDefaults(t *testing.T) {
	scripts := map[string]string{"tells": `grep -E '^Sig(Blk|Ign)' /proc/self/status; umask; nice; ulimit -n`}
	eachVersion(t, scripts, func(t *testing.T, s scene) {
		out, err := s.call(t, s.begin(t, "CHECK", 1), "tells", "")
		harness.Check(t, err)
		// What the shell that runs this test has is what the daemon was started with.
		plain, err := exec.Command("sh", filepath.Join(s.bin, "tells")).Output()
		harness.Check(t, err)
		harness.Want(t, out == string(plain) && strings.Contains(out, "SigBlk:\t0000000000000000"), "the plugin has\n%swant\n%s", out, plain)
	})
}

// What a plugin wrote to stderr is known when it was killed with its run, too, and can be shown whatever bytes it has.
func TestStderrOfAKilledPlugin(t *testing.T) {
	eachVersion(t, map[string]string{"hang": `head -c 9000 /dev/zero | tr '\0' x >&2; printf 'waits for \377\000the agent\n' >&2; sleep 600`}, func(t *testing.T, s scene) {
		run := s.begin(t, "ADD", 1)
		ended := make(chan error, 1)
		go func() {
			_, err := s.call(t, run, "hang", "")
			ended <- err
		}()
		harness.Eventually(t, "the plugin has written", func() bool {
			all := run.Reports()
			return len(all) == 1 && strings.Contains(all[0].Stderr, "agent")
		})
		harness.Check(t, run.Kill(within))
		harness.Want(t, <-ended != nil, "it succeeded")
		report := run.Reports()[0]
		text := report.Text()
		harness.Want(t, report.Killed, "report %+v, text %q", report, text)
		harness.Want(t, len(report.Stderr) <= 5000, "report %+v, text %q", report, text)
		harness.Want(t, strings.HasPrefix(report.Stderr, "xxx"), "report %+v, text %q", report, text)
		harness.Want(t, strings.Contains(text, "waits for ??the agent"), "report %+v, text %q", report, text)
		harness.Want(t, utf8.ValidString(text), "report %+v, text %q", report, text)
		harness.Want(t, len(text) <= 500, "report %+v, text %q", report, text)
		_, err := s.call(t, run, "hang", "")
		harness.WantError(t, err, "the run is over")
	})
}

// An error of any length and any bytes is one that a kubelet can show.
func TestErrorOfAnyLength(t *testing.T) {
	scripts := map[string]string{
		"long":  `printf '{"code": 7, "msg": "'; head -c 9000 /dev/zero | tr '\0' x; printf ' \\u0000\\u001b[2J", "details": "d"}'; exit 1`,
		"bytes": `head -c 9000 /dev/zero | tr '\0' '\377'; exit 1`,
	}
	eachVersion(t, scripts, func(t *testing.T, s scene) {
		run := s.begin(t, "ADD", 2)
		for i, plugin := range []string{"long", "bytes"} {
			_, err := s.call(t, run, plugin, "")
			harness.Want(t, err != nil, "%s succeeded", plugin)
			if text := run.Reports()[i].Text(); len(text) > 4000 || !utf8.ValidString(text) || strings.ContainsAny(text, "\x00\x1b") {
				t.Errorf("%s: %d bytes: %.100q", plugin, len(text), text)
			}
		}
		first := run.Reports()[0]
		harness.Want(t, first.Code == 7, "%.300v", first)
		harness.Want(t, strings.Contains(first.Message, "bytes)"), "%.300v", first)
		harness.Want(t, first.Details == "d", "%.300v", first)
	})
}

// A plugin that writes without end finds its pipe closed, and costs the daemon, which keeps what
// is printed in memory, a few MiB; one that says a lot on stderr is heard to the end.
func TestPluginThatWritesTooMuch(t *testing.T) {
	scripts := map[string]string{
		"endless": `exec cat /dev/zero`,
		"chatty":  `head -c 20000000 /dev/zero >&2; echo last words >&2; echo '{}'`,
	}
	eachVersion(t, scripts, func(t *testing.T, s scene) {
		run := s.begin(t, "ADD", 2)
		out, err := s.call(t, run, "endless", "")
		harness.Want(t, err != nil && len(out) <= maxAnswer, "%d bytes, %v", len(out), err)
		out, err = s.call(t, run, "chatty", "")
		harness.Want(t, err == nil && out == "{}\n", "%q, %v", out, err)
		all := run.Reports()
		harness.Need(t, len(all) == 2, "%q, %.100q", all[0].Text(), all[1].Stderr)
		harness.Want(t, strings.Contains(all[0].Text(), "more than 4 MiB"), "%q, %.100q", all[0].Text(), all[1].Stderr)
		harness.Want(t, strings.HasSuffix(all[1].Stderr, "last words\n"), "%q, %.100q", all[0].Text(), all[1].Stderr)
		harness.Want(t, len(all[1].Stderr) <= 3*maxStderr, "%q, %.100q", all[0].Text(), all[1].Stderr)
		harness.Want(t, !run.Running(), "the run is not over")
	})
}

// How a plugin fails is known, and told.
func TestPluginThatFails(t *testing.T) {
	scripts := map[string]string{
		"error":  `echo '{"code": 7, "msg": "no \"way\"", "details": "d"}'; exit 3`,
		"words":  `echo only words >&2; exit 4`,
		"killed": `kill -KILL $$`,
		"late":   `echo '{"cniVersion": "1.0.0"}'; kill -TERM $$`,
	}
	eachVersion(t, scripts, func(t *testing.T, s scene) {
		harness.Check(t, os.WriteFile(filepath.Join(s.bin, "garbage"), []byte("\x7fgarbage"), 0o755))
		run := s.begin(t, "ADD", 6)
		for plugin, says := range map[string]string{
			"error": "no \"way\"; d", "words": "exit code 4 without a CNI error: only words", "killed": "it was ended by signal 9 (killed)",
			"late": "it was ended by signal 15 (terminated)", "missing": "failed to find the plugin missing in " + s.bin, "garbage": "garbage: exec format error",
		} {
			_, err := s.call(t, run, plugin, "")
			harness.WantError(t, err, says)
		}
		all := run.Reports()
		harness.Want(t, len(all) == 6 && run.Verdict() != nil, "reports %+v", all)
	})
}

// An error of the runner itself names its cause: here that no process can be made.
func TestPluginThatCannotBeStarted(t *testing.T) {
	var pids cgroup.Group
	for _, parent := range parents(t) {
		if !parent.V2 {
			pids = parent
		}
	}
	if pids.Dir == "" {
		t.Skip("needs cgroup v1, where a controller of pids is in a hierarchy of its own")
	}
	r, err := Open(pids, "unit-")
	harness.Check(t, err)
	run, err := r.Begin(Request{Verb: "ADD", ID: "web", Plugins: 1, Limit: within})
	harness.Check(t, err)
	harness.Check(t, os.WriteFile(filepath.Join(run.Group.Dir, "pids.max"), []byte("0"), 0))
	_, err = run.ExecPlugin(t.Context(), "/bin/true", nil, nil)
	harness.WantError(t, err, "start the plugin", "resource temporarily unavailable")
	harness.Eventually(t, "the thread that entered the cgroup has ended", func() bool { return !run.Running() })
	harness.Check(t, run.End())
}

// A plugin that an installer is writing is started when it is whole; one that stays open for
// writing fails, and says so, and a run that is killed does not wait for it.
func TestPluginThatIsBeingWritten(t *testing.T) {
	eachVersion(t, map[string]string{"copied": "echo whole", "open": ""}, func(t *testing.T, s scene) {
		file, err := os.OpenFile(filepath.Join(s.bin, "copied"), os.O_WRONLY, 0)
		harness.Check(t, err)
		open, err := os.OpenFile(filepath.Join(s.bin, "open"), os.O_WRONLY, 0)
		harness.Check(t, err)
		defer open.Close()
		if err := exec.Command(open.Name()).Run(); !errors.Is(err, unix.ETXTBSY) {
			t.Skipf("this kernel runs what is open for writing (%v)", err)
		}
		time.AfterFunc(150*time.Millisecond, func() { _ = file.Close() })
		out, err := s.call(t, s.begin(t, "ADD", 1), "copied", "")
		harness.Want(t, err == nil && out == "whole\n", "got %q, %v", out, err)
		run := s.begin(t, "ADD", 1)
		run.Limit = time.Second
		_, err = s.call(t, run, "open", "")
		harness.WantError(t, err, "text file busy")
		run = s.begin(t, "ADD", 1)
		time.AfterFunc(150*time.Millisecond, func() { _ = run.Kill(within) })
		_, err = s.call(t, run, "open", "")
		harness.WantError(t, err, "did not answer")
	})
}

// In a chain of DELs each plugin gets its own, whatever the others say; libcni hears of a failure from the last one.
func TestChainOfDELs(t *testing.T) {
	scripts := map[string]string{"good": "exit 0", "bad": `echo '{"code": 9, "msg": "not found"}'; exit 1`}
	eachVersion(t, scripts, func(t *testing.T, s scene) {
		for _, chain := range [][]string{{"bad", "good"}, {"good", "bad"}, {"missing", "bad", "good"}, {"bad"}} {
			run := s.begin(t, "DEL", len(chain))
			for i, plugin := range chain {
				_, err := s.call(t, run, plugin, "")
				harness.Want(t, (i == len(chain)-1) == (err != nil), "%q: plugin %d: %v", chain, i, err)
			}
			harness.Want(t, run.Verdict() != nil, "%q: a chain with a plugin that failed is a success", chain)
		}
		run := s.begin(t, "DEL", 2)
		for range 2 {
			harness.Want(t, run.Verdict() != nil, "a chain that has not run to its end is a success")
			_, err := s.call(t, run, "good", "")
			harness.Check(t, err)
		}
		harness.Check(t, run.Verdict())
	})
}

// A child that holds a plugin's input and output, in a session and with an environment of its own, takes no answer
// away, belongs to the run, is found by the next daemon, and is ended with the run.
func TestChildThatIsLeft(t *testing.T) {
	scripts := map[string]string{"leaves": `env -i setsid sh -c 'sleep 600 & sleep 600' & echo done`}
	eachVersion(t, scripts, func(t *testing.T, s scene) {
		run := s.begin(t, "CHECK", 1)
		out, err := s.call(t, run, "leaves", strings.Repeat("x", 1<<20))
		harness.Want(t, err == nil && out == "done\n", "%q, %v", out, err)
		harness.Need(t, run.Running(), "the child is not of the run")
		left, err := s.Left()
		harness.Need(t, err == nil && len(left) == 1, "%+v, %v", left, err)
		harness.Want(t, left[0].Group == run.Group, "%+v, %v", left, err)
		harness.Want(t, left[0].ID == "web", "%+v, %v", left, err)
		harness.Want(t, left[0].Verb == "CHECK", "%+v, %v", left, err)
		harness.Want(t, time.Until(left[0].Deadline).Abs() <= within, "%+v, %v", left, err)
		harness.Check(t, run.Kill(within))
		harness.Want(t, !run.Running(), "the child lives")
	})
}

// A plugin that has moved itself out of its cgroup is ended all the same.
func TestPluginThatLeavesItsCgroup(t *testing.T) {
	for name, parent := range parents(t) {
		t.Run(name, func(t *testing.T) {
			bin := t.TempDir()
			script := fmt.Sprintf("#!/bin/sh\necho $$ >%s/cgroup.procs\necho $$ >%s/moved\nexec sleep 600\n", parent.Dir, bin)
			harness.Check(t, os.WriteFile(filepath.Join(bin, "moves"), []byte(script), 0o755))
			r, err := Open(parent, "unit-")
			harness.Check(t, err)
			s := scene{r, bin}
			run := s.begin(t, "ADD", 1)
			ended := make(chan error, 1)
			go func() {
				_, err := s.call(t, run, "moves", "")
				ended <- err
			}()
			harness.Eventually(t, "it has moved", func() bool { _, err := os.Stat(filepath.Join(bin, "moved")); return err == nil })
			harness.Check(t, run.Kill(within))
			harness.Want(t, <-ended != nil, "it succeeded")
		})
	}
}

// A cgroup in which nothing runs is removed, one whose name is no run's is left alone
// with what runs in it, and another's is not touched.
func TestLeftRuns(t *testing.T) {
	eachVersion(t, map[string]string{"leaves": `sleep 600 &`}, func(t *testing.T, s scene) {
		empty, lives := s.begin(t, "ADD", 1), s.begin(t, "DEL", 1)
		_, err := s.call(t, lives, "leaves", "")
		harness.Check(t, err)
		another, unknown := s.parent.Child("another-1"), s.parent.Child("unit-no run")
		harness.Check(t, errors.Join(another.Make(), unknown.Make()))
		stays := exec.Command("sleep", "600")
		harness.Check(t, unknown.Start(stays))
		defer func() { _, _ = stays.Process.Kill(), stays.Wait() }()
		left, err := s.Left()
		harness.Need(t, err != nil, "got %v, %v, want an error about %s", left, err, unknown.Dir)
		harness.Want(t, strings.Contains(err.Error(), unknown.Dir),
			"got %v, %v, want an error about %s", left, err, unknown.Dir)
		harness.Want(t, len(left) == 1, "got %v, %v, want an error about %s", left, err, unknown.Dir)
		harness.Want(t, left[0].Verb == "DEL", "got %v, %v, want an error about %s", left, err, unknown.Dir)
		for group, there := range map[cgroup.Group]bool{empty.Group: false, lives.Group: true, another: true, unknown: true} {
			_, err := os.Stat(group.Dir)
			harness.Want(t, (err == nil) == there, "%s: %v", group.Dir, err)
		}
		harness.Want(t, alive(stays.Process.Pid) && lives.Running(), "a process was ended")
	})
}

// What a plugin printed before it ended is its answer, also where this process was given
// no time to read it, and something that the plugin has left holds the pipe.
func TestRestOfThePipeIsRead(t *testing.T) {
	from, to, err := os.Pipe()
	harness.Check(t, err)
	defer from.Close()
	defer to.Close()
	_, err = to.WriteString("{}")
	harness.Check(t, err)
	harness.Check(t, from.SetReadDeadline(time.Now().Add(-time.Second)))
	n, err := from.Read(make([]byte, 2))
	harness.Need(t, n <= 0 && errors.Is(err, os.ErrDeadlineExceeded), "%d bytes are read after the deadline, %v", n, err)
	harness.Same(t, "the rest of the pipe", string(rest(from)), "{}")
}

// FuzzAnswer reads what a plugin that failed has printed. Results of success are
// parsed by libcni; what is parsed here are errors.
func FuzzAnswer(f *testing.F) {
	for _, seed := range []string{
		"", "{}", `{"code":11,"msg":"try again"}`, `{"code":-1}`, `{"code":"11","msg":5}`, "[", "null", "\xff\x00", `{"msg":"\u0000\u001b[2J","details":"d"}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		r := Report{Plugin: step.Plugin{Exit: 1}}
		r.takeError(data)
		text := r.Text()
		harness.Want(t, text != "", "%d bytes became %q", len(data), text)
		harness.Want(t, utf8.ValidString(text), "%d bytes became %q", len(data), text)
		harness.Want(t, len(r.Message) <= 8*maxShown+64, "%d bytes became %q", len(data), text)
	})
}
