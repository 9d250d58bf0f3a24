package runner

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/cgroup"
)

// within is far more than anything here takes, on a busy machine too.
const within = time.Minute

// parents are a cgroup in each kind of hierarchy that this machine has.
func parents(t testing.TB) map[string]cgroup.Group {
	t.Helper()
	path := fmt.Sprintf("/minicri-unit-runner-%d-%d", os.Getpid(), time.Now().UnixNano())
	found := make(map[string]cgroup.Group)
	parent, err := cgroup.GroupParent(path)
	must(t, err)
	found[fmt.Sprintf("v2=%v", parent.V2)] = parent
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup2"))
	must(t, err)
	for _, m := range mounts {
		found["v2=true"] = cgroup.Group{Dir: filepath.Join(m.Mountpoint, path), V2: true}
	}
	for _, parent := range found {
		must(t, parent.Make())
		t.Cleanup(func() {
			if err := errors.Join(parent.Kill(within), parent.Remove()); err != nil {
				t.Error(err)
			}
		})
	}
	return found
}

// eachVersion runs a test with a runner in each kind of hierarchy, whose
// plugins are the given shell scripts.
func eachVersion(t *testing.T, scripts map[string]string, test func(t *testing.T, r *Runner)) {
	for name, parent := range parents(t) {
		t.Run(name, func(t *testing.T) {
			bin := t.TempDir()
			for name, script := range scripts {
				must(t, os.WriteFile(filepath.Join(bin, name), []byte("#!/bin/sh\n"+script), 0o755))
			}
			r, err := Open(Options{Dir: t.TempDir(), Program: filepath.Join(t.TempDir(), "runner"), BinDirs: []string{bin}, Parent: parent, Mark: "unit-"})
			must(t, err)
			_, _, err = r.Runs()
			must(t, err)
			t.Cleanup(func() { must(t, r.Close()) })
			test(t, r)
		})
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// call runs a plugin of the run's chain as libcni does.
func call(t *testing.T, run *Run, plugin, stdin string) (stdout, stderr string, err error) {
	t.Helper()
	var out, errs bytes.Buffer
	command := exec.Command(filepath.Join(run.PluginDir(), plugin))
	command.Env = []string{"PATH=" + os.Getenv("PATH"), "CNI_COMMAND=" + run.Verb, "CNI_PATH=" + run.PluginDir(), "KEPT=yes"}
	command.Stdin, command.Stdout, command.Stderr = strings.NewReader(stdin), &out, &errs
	err = command.Run()
	return out.String(), errs.String(), err
}

func begin(t *testing.T, r *Runner, verb string, plugins ...string) *Run {
	t.Helper()
	run, err := r.Begin(Request{Verb: verb, ID: "web", Network: "net", Plugins: plugins, Limit: within})
	must(t, err)
	t.Cleanup(func() { _ = errors.Join(run.Kill(within), run.End()) })
	return run
}

func reports(t *testing.T, run *Run) []Report {
	t.Helper()
	all, err := run.Reports()
	must(t, err)
	return all
}

func TestProgramIsSmall(t *testing.T) {
	program, err := Program()
	must(t, err)
	if len(program) == 0 || len(program) >= 16<<10 {
		t.Errorf("runner.elf has %d bytes, want 1 to 16383", len(program))
	}
}

// A plugin sees what it would without a runner: its own path, its input, its
// environment; and what it says comes out, large or small.
func TestPluginRunsAsItself(t *testing.T) {
	scripts := map[string]string{
		"echo": `echo "$0 $KEPT $CNI_COMMAND"; echo words >&2; cat`,
		"big":  `head -c 1000000 /dev/zero | tr '\0' x`,
	}
	eachVersion(t, scripts, func(t *testing.T, r *Runner) {
		run := begin(t, r, "ADD", "echo", "big")
		stdout, stderr, err := call(t, run, "echo", "its input")
		want := filepath.Join(r.options.BinDirs[0], "echo") + " yes ADD\nits input"
		if err != nil || stdout != want || stderr != "words\n" {
			t.Errorf("%q, %q, %v, want %q", stdout, stderr, err, want)
		}
		if stdout, _, err := call(t, run, "big", ""); err != nil || len(stdout) != 1000000 || strings.Trim(stdout, "x") != "" {
			t.Errorf("%d bytes, %v", len(stdout), err)
		}
		all := reports(t, run)
		if len(all) != 2 || all[0].Plugin != "echo" || all[0].Verb != "ADD" || all[0].Stderr != "words\n" || all[0].Failed() || all[1].Plugin != "big" || all[1].Took <= 0 {
			t.Errorf("reports %+v", all)
		}
		must(t, run.Verdict(all))
		if run.Running() {
			t.Error("the run is not over")
		}
	})
}

// What a plugin wrote to stderr is known when it was killed with its run, too, and
// can be shown whatever bytes it has.
func TestStderrOfAKilledPlugin(t *testing.T) {
	eachVersion(t, map[string]string{"hang": `head -c 9000 /dev/zero | tr '\0' x >&2; printf 'waits for \377\000the agent\n' >&2; sleep 600`}, func(t *testing.T, r *Runner) {
		run := begin(t, r, "ADD", "hang")
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_, _, _ = call(t, run, "hang", "")
		}()
		eventually(t, "the plugin has written", func() bool {
			all := reports(t, run)
			return len(all) == 1 && strings.Contains(all[0].Stderr, "agent")
		})
		must(t, run.Kill(within))
		<-ended
		report := reports(t, run)[0]
		if text := report.Text(); report.Ended || len(report.Stderr) > 5000 || !strings.HasPrefix(report.Stderr, "xxx") ||
			!strings.Contains(text, "waits for \ufffd\ufffdthe agent") || !utf8.ValidString(text) || len(text) > 500 {
			t.Errorf("report %+v, text %q", report, text)
		}
	})
}

// An error of any length and any bytes is one that a kubelet can show.
func TestErrorOfAnyLength(t *testing.T) {
	scripts := map[string]string{
		"long":  `printf '{"code": 7, "msg": "'; head -c 9000 /dev/zero | tr '\0' x; printf ' \\u0000\\u001b[2J", "details": "d"}'; exit 1`,
		"bytes": `head -c 9000 /dev/zero | tr '\0' '\377'; exit 1`,
	}
	eachVersion(t, scripts, func(t *testing.T, r *Runner) {
		run := begin(t, r, "ADD", "long", "bytes")
		for i, plugin := range run.Plugins {
			if _, _, err := call(t, run, plugin, ""); err == nil {
				t.Errorf("%s succeeded", plugin)
			}
			report := reports(t, run)[i]
			if text := fmt.Sprint(report.Err()); len(text) > 4000 || !utf8.ValidString(text) || strings.ContainsAny(text, "\x00\x1b") {
				t.Errorf("%s: %d bytes: %.100q", plugin, len(text), text)
			}
		}
		if first := reports(t, run)[0]; first.Code != 7 || !strings.Contains(first.Message, "bytes)") || first.Details != "d" {
			t.Errorf("%.300v", first)
		}
	})
}

// A plugin that writes without end is ended, and costs the daemon, which keeps what
// is handed on in memory, a few MiB; one that says a lot on stderr is heard to the end.
func TestPluginThatWritesTooMuch(t *testing.T) {
	scripts := map[string]string{
		"endless": `exec cat /dev/zero`,
		"chatty":  `head -c 20000000 /dev/zero >&2; echo last words >&2; echo '{}'`,
	}
	eachVersion(t, scripts, func(t *testing.T, r *Runner) {
		run := begin(t, r, "ADD", "endless", "chatty")
		stdout, _, err := call(t, run, "endless", "")
		if err == nil || len(stdout) > 6<<20 {
			t.Errorf("%d bytes, %v", len(stdout), err)
		}
		stdout, stderr, err := call(t, run, "chatty", "")
		if err != nil || stdout != "{}\n" || len(stderr) > 128<<10 {
			t.Errorf("%q, %d bytes of stderr, %v", stdout, len(stderr), err)
		}
		all := reports(t, run)
		if len(all) != 2 || all[0].Exit != 1 || !strings.Contains(all[0].Text(), "more than 4 MiB") || !strings.HasSuffix(all[1].Stderr, "last words\n") {
			t.Errorf("reports %.600v", all)
		}
		if run.Running() {
			t.Error("the run is not over")
		}
	})
}

// How a plugin fails is known, and its parent hears of it.
func TestPluginThatFails(t *testing.T) {
	scripts := map[string]string{
		"error":  `echo '{"code": 7, "msg": "no \"way\"", "details": "d"}'; exit 3`,
		"words":  `echo only words >&2; exit 4`,
		"killed": `kill -KILL $$`,
	}
	eachVersion(t, scripts, func(t *testing.T, r *Runner) {
		run := begin(t, r, "ADD", "error", "words", "killed", "missing")
		for _, plugin := range run.Plugins {
			if _, _, err := call(t, run, plugin, ""); err == nil {
				t.Errorf("%s: success", plugin)
			}
		}
		all := reports(t, run)
		if len(all) != 4 {
			t.Fatalf("reports %+v", all)
		}
		if e := all[0]; e.Exit != 3 || e.Code != 7 || e.Message != `no "way"` || e.Details != "d" {
			t.Errorf("%+v", e)
		}
		for i, says := range []string{"no \"way\"; d (CNI error code 7)", "exit code 4 without a CNI error: only words", "killed was ended by signal 9", "failed to find the plugin missing in " + r.options.BinDirs[0]} {
			if err := all[i].Err(); err == nil || !strings.Contains(err.Error(), says) {
				t.Errorf("got %v, want an error that says %q", err, says)
			}
		}
	})
}

// A program that is no program is an error that names it.
func TestPluginThatCannotRun(t *testing.T) {
	eachVersion(t, nil, func(t *testing.T, r *Runner) {
		must(t, os.WriteFile(filepath.Join(r.options.BinDirs[0], "garbage"), []byte("\x7fgarbage"), 0o755))
		run := begin(t, r, "ADD", "garbage")
		stdout, _, err := call(t, run, "garbage", "")
		if err == nil || !strings.Contains(stdout, "garbage: exec format error") {
			t.Errorf("%q, %v", stdout, err)
		}
	})
}

// In a chain of DELs each plugin gets its own, whatever the others say; libcni
// hears of a failure from the last one.
func TestChainOfDELs(t *testing.T) {
	scripts := map[string]string{"good": "exit 0", "bad": `echo '{"code": 9, "msg": "not found"}'; exit 1`}
	eachVersion(t, scripts, func(t *testing.T, r *Runner) {
		for _, chain := range [][]string{{"bad", "good"}, {"good", "bad"}, {"missing", "bad", "good"}, {"bad"}} {
			run := begin(t, r, "DEL", chain...)
			for i, plugin := range chain {
				stdout, _, err := call(t, run, plugin, "")
				last := i == len(chain)-1
				if last != (err != nil) || last != strings.Contains(stdout, "msg") {
					t.Errorf("%q: plugin %d: %q, %v", chain, i, stdout, err)
				}
			}
			if err := run.Verdict(reports(t, run)); err == nil || !strings.Contains(err.Error(), "not found") {
				t.Errorf("%q: verdict %v", chain, err)
			}
		}
		run := begin(t, r, "DEL", "good", "good")
		for range 2 {
			if run.Verdict(reports(t, run)) == nil {
				t.Error("a chain that has not run to its end is a success")
			}
			_, _, err := call(t, run, "good", "")
			must(t, err)
		}
		must(t, run.Verdict(reports(t, run)))
	})
}

// A plugin that runs another one does so through the runner too, and hears its
// answer unchanged: only the chain's DELs continue.
func TestPluginOfAPlugin(t *testing.T) {
	scripts := map[string]string{
		"outer": `cat | "$CNI_PATH/inner" || exit 5`,
		"inner": `cat >/dev/null; echo '{"code": 8, "msg": "inner"}'; exit 1`,
	}
	eachVersion(t, scripts, func(t *testing.T, r *Runner) {
		run := begin(t, r, "DEL", "outer")
		stdout, _, err := call(t, run, "outer", "")
		if err == nil || !strings.Contains(stdout, "inner") {
			t.Errorf("%q, %v", stdout, err)
		}
		all := reports(t, run)
		if len(all) != 2 || all[0].Plugin != "outer" || all[0].Parent != "" || all[0].Exit != 5 || all[1].Plugin != "inner" || all[1].Parent != "outer DEL" || all[1].Code != 8 {
			t.Errorf("reports %+v", all)
		}
	})
}

// A child that holds a plugin's output, in a session and with an environment of
// its own, delays no answer, belongs to the run, and is ended with it.
func TestChildThatIsLeft(t *testing.T) {
	scripts := map[string]string{"leaves": `env -i setsid sh -c 'sleep 600 & sleep 600' & echo done`}
	eachVersion(t, scripts, func(t *testing.T, r *Runner) {
		run := begin(t, r, "ADD", "leaves")
		began := time.Now()
		stdout, _, err := call(t, run, "leaves", "")
		if err != nil || stdout != "done\n" || time.Since(began) > within {
			t.Errorf("%q, %v after %v", stdout, err, time.Since(began))
		}
		if !run.Running() {
			t.Fatal("the child is not of the run")
		}
		must(t, run.Done())
		unfinished, done, err := r.Runs()
		if err != nil || len(unfinished) != 0 || len(done) != 1 || done[0].Group != run.Group || done[0].ID != "web" {
			t.Errorf("%+v, %+v, %v", unfinished, done, err)
		}
		must(t, run.Kill(within))
		if run.Running() {
			t.Error("the child lives")
		}
	})
}

// A plugin outlives the one who started it, and its answer is known all the
// same.
func TestPluginThatOutlivesItsParent(t *testing.T) {
	scripts := map[string]string{"slow": `while [ ! -e "$(dirname "$0")/go" ]; do sleep 0.01; done; echo "answer"; echo words >&2`}
	eachVersion(t, scripts, func(t *testing.T, r *Runner) {
		run := begin(t, r, "DEL", "slow")
		read, write, err := os.Pipe()
		must(t, err)
		command := exec.Command(filepath.Join(run.PluginDir(), "slow"))
		command.Env = []string{"PATH=" + os.Getenv("PATH"), "CNI_COMMAND=DEL", "CNI_PATH=" + run.PluginDir()}
		command.Stdout, command.Stderr = write, write
		command.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		must(t, command.Start())
		go func() { _ = command.Wait() }()
		must(t, errors.Join(read.Close(), write.Close()))
		eventually(t, "it runs", run.Running)
		unfinished, _, err := r.Runs()
		if err != nil || len(unfinished) != 1 || unfinished[0].Verb != "DEL" || unfinished[0].Limit != within || !slices.Equal(unfinished[0].Plugins, run.Plugins) {
			t.Fatalf("%+v, %v", unfinished, err)
		}
		if unfinished[0].Verdict(reports(t, unfinished[0])) == nil {
			t.Error("success before the end")
		}
		must(t, os.WriteFile(filepath.Join(r.options.BinDirs[0], "go"), nil, 0o600))
		eventually(t, "it ends", func() bool { return !run.Running() })
		must(t, unfinished[0].Verdict(reports(t, unfinished[0])))
	})
}

// A plugin that is started when its run has been removed does not run.
func TestPluginOfARunThatIsOver(t *testing.T) {
	eachVersion(t, map[string]string{"touches": `touch "$(dirname "$0")/ran"`}, func(t *testing.T, r *Runner) {
		run := begin(t, r, "ADD", "touches")
		must(t, run.Group.Remove())
		if stdout, _, err := call(t, run, "touches", ""); err == nil || !strings.Contains(stdout, "enter the cgroup") {
			t.Errorf("%q, %v", stdout, err)
		}
		if _, err := os.Stat(filepath.Join(r.options.BinDirs[0], "ran")); err == nil {
			t.Error("it ran")
		}
	})
}

// Plugins that are installed later are found, and an older program is replaced.
func TestLinksFollowTheDirectories(t *testing.T) {
	eachVersion(t, map[string]string{"first": "echo first"}, func(t *testing.T, r *Runner) {
		run := begin(t, r, "ADD", "later")
		if _, _, err := call(t, run, "later", ""); err == nil {
			t.Error("a plugin that is not there ran")
		}
		must(t, os.WriteFile(filepath.Join(r.options.BinDirs[0], "later"), []byte("#!/bin/sh\nexec \"$CNI_PATH/first\"\n"), 0o755))
		run = begin(t, r, "ADD", "later")
		if stdout, _, err := call(t, run, "later", ""); err != nil || stdout != "first\n" {
			t.Errorf("%q, %v", stdout, err)
		}
		must(t, os.WriteFile(r.options.Program, []byte("older"), 0o700))
		again, err := Open(r.options)
		must(t, err)
		if stdout, _, err := call(t, begin(t, again, "ADD", "first"), "first", ""); err != nil || stdout != "first\n" {
			t.Errorf("%q, %v", stdout, err)
		}
	})
}

// A cgroup whose run is not known any more is removed, unless something runs in
// it, or it is another one's.
func TestSweepOfCgroups(t *testing.T) {
	eachVersion(t, map[string]string{"leaves": `sleep 600 &`}, func(t *testing.T, r *Runner) {
		r.idle = nil // cgroups of their own
		known, gone, lives := begin(t, r, "ADD"), begin(t, r, "ADD"), begin(t, r, "ADD", "leaves")
		another := r.options.Parent.Child("another-1")
		must(t, another.Make())
		_, _, err := call(t, lives, "leaves", "")
		must(t, err)
		must(t, errors.Join(os.RemoveAll(gone.dir), os.RemoveAll(lives.dir)))
		if _, _, err := r.Runs(); err == nil || !strings.Contains(err.Error(), lives.Group.Dir) {
			t.Errorf("got %v, want an error about %s", err, lives.Group.Dir)
		}
		for group, there := range map[cgroup.Group]bool{known.Group: true, gone.Group: false, lives.Group: true, another: true} {
			if _, err := os.Stat(group.Dir); (err == nil) != there {
				t.Errorf("%s: %v", group.Dir, err)
			}
		}
		if !lives.Running() {
			t.Error("the process was ended")
		}
	})
}

// A run whose file cannot be read is not taken for one that is over: it is found by
// the next daemon that can.
func TestRunThatCannotBeRead(t *testing.T) {
	eachVersion(t, map[string]string{"leaves": `sleep 600 &`}, func(t *testing.T, r *Runner) {
		run := begin(t, r, "ADD", "leaves")
		_, _, err := call(t, run, "leaves", "")
		must(t, err)
		file := filepath.Join(run.dir, "request.json")
		must(t, errors.Join(os.Rename(file, file+".there"), os.Symlink("request.json", file))) // ELOOP
		next, err := Open(r.options)
		must(t, err)
		if left, done, err := next.Runs(); err == nil || len(left)+len(done) != 0 || slices.Contains(next.idle, run.Group) {
			t.Errorf("found %v, %v, %v; free cgroups %v", left, done, err, next.idle)
		}
		must(t, os.Rename(file+".there", file))
		left, _, err := next.Runs()
		must(t, err)
		if len(left) != 1 || left[0].Verb != "ADD" || !left[0].Running() {
			t.Fatalf("found %+v", left)
		}
		must(t, errors.Join(left[0].Kill(within), left[0].End(), next.Close()))
	})
}

// The cgroups of the pool serve one run after the other; one that is killed, or
// has made cgroups below its own, leaves nothing to the next. Those of a daemon
// that was killed are found again, and Close removes all.
func TestPoolOfCgroups(t *testing.T) {
	eachVersion(t, map[string]string{"leaves": `mkdir "$GROUP/below"; sleep 600 &`}, func(t *testing.T, r *Runner) {
		count := func() int {
			t.Helper()
			entries, err := filepath.Glob(filepath.Join(r.options.Parent.Dir, "unit-*"))
			must(t, err)
			return len(entries)
		}
		for range 2 * pooled {
			run := begin(t, r, "ADD", "leaves")
			command := exec.Command(filepath.Join(run.PluginDir(), "leaves"))
			command.Env = []string{"PATH=" + os.Getenv("PATH"), "CNI_COMMAND=ADD", "GROUP=" + run.Group.Dir}
			must(t, command.Run())
			if err := run.End(); err == nil || !run.Running() {
				t.Fatalf("ended beside a process that lives: %v", err)
			}
			must(t, errors.Join(run.Kill(within), run.End(), run.End()))
			if parted := run.Group.Parted(); parted || count() != pooled {
				t.Errorf("cgroups below: %v, %d cgroups", parted, count())
			}
		}
		var runs []*Run
		for range pooled + 2 {
			runs = append(runs, begin(t, r, "ADD"))
		}
		if got := count(); got != pooled+2 {
			t.Errorf("%d cgroups for %d runs", got, pooled+2)
		}
		// A daemon that comes next finds the runs, and the pool without theirs.
		next, err := Open(r.options)
		must(t, err)
		left, _, err := next.Runs()
		must(t, err)
		if len(left) != len(runs) || len(next.idle) != 0 {
			t.Errorf("%d runs are found, %d cgroups are free", len(left), len(next.idle))
		}
		for _, run := range left {
			must(t, run.End())
		}
		if len(next.idle) != pooled || count() != pooled {
			t.Errorf("%d of %d cgroups are free", len(next.idle), count())
		}
		must(t, next.Close())
		if got := count(); got != 0 {
			t.Errorf("%d cgroups are left", got)
		}
	})
}

// A directory that is full takes runs all the same.
func TestRunsOnAFullDisk(t *testing.T) {
	eachVersion(t, map[string]string{"ok": `exit 0`}, func(t *testing.T, r *Runner) {
		disk := t.TempDir()
		must(t, unix.Mount("small", disk, "tmpfs", 0, "size=64k"))
		t.Cleanup(func() { must(t, unix.Unmount(disk, unix.MNT_DETACH)) })
		options := r.options
		options.Dir = filepath.Join(disk, "cni")
		full, err := Open(options)
		must(t, err)
		if err := os.WriteFile(filepath.Join(disk, "filler"), make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
			t.Fatalf("filling the disk: %v", err)
		}
		run := begin(t, full, "DEL", "ok")
		if _, _, err := call(t, run, "ok", ""); err != nil {
			t.Error(err)
		}
		must(t, run.Verdict(reports(t, run)))
		must(t, errors.Join(run.End(), full.Close()))
		if mounted, err := mountinfo.Mounted(options.Dir); err != nil || mounted {
			t.Errorf("the directory stays mounted: %v, %v", mounted, err)
		}
	})
}

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(within); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", within, what)
		}
	}
}

// A daemon has for a run of another one what is left of its limit.
func TestDeadline(t *testing.T) {
	const limit = time.Minute
	for began, want := range map[time.Duration]time.Duration{
		0:                            limit, // not noted
		monotonic() + time.Hour:      limit, // of another time namespace
		monotonic() - 20*time.Second: limit - 20*time.Second,
		monotonic() - 2*time.Hour:    0,
	} {
		run := Run{Request: Request{Limit: limit}, Began: began}
		before := time.Now()
		got := run.Deadline()
		if got.Before(before.Add(want-10*time.Second)) || got.Before(before) || got.After(time.Now().Add(want)) {
			t.Errorf("began at %v: %v, want %v", began, got.Sub(before), want)
		}
	}
}
