package client_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/shim/api"
	"github.com/minicri/minicri/shim/client"
)

// anotherBuild is the shim with one byte more, which says its number.
func anotherBuild(t *testing.T, number int) string {
	t.Helper()
	content, err := os.ReadFile(shimBinary)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), fmt.Sprint("build", number))
	if err := os.WriteFile(path, append(content, byte(number)), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

// upgrade makes the supervisor another build.
func (p *pod) upgrade(path string) error {
	program, err := client.OpenProgram(path)
	if err != nil {
		return err
	}
	defer program.Close()
	info, err := client.Upgrade(p.t.Context(), p.dir, program.ForOthers(), program.Build())
	if err != nil {
		return err
	}
	p.t.Logf("build %s, output was held up for %v", info.GetBuild(), time.Duration(info.GetPaused()))
	if pause := time.Duration(info.GetPaused()); pause <= 0 || pause > longestPause {
		p.t.Errorf("output was held up for %v", pause)
	}
	_ = p.Close()
	p.Client, err = client.Connect(p.t.Context(), p.dir)
	return err
}

// longestPause is 100 ms on a machine that has nothing else to do, with a build
// that is not slowed down by the race detector.
const longestPause = 3 * time.Second

// Containers of all kinds survive upgrades: their processes, logs byte for
// byte, terminals, inputs, and exits while it happens; one that waits at the
// barrier starts under the next build.
func TestUpgradeInPlace(t *testing.T) {
	p := startPod(t)
	supervisor := p.pid()
	terminal := func(s *specs.Spec, r *api.CreateRequest) { s.Process.Terminal, r.Stdin = true, true }
	pids := map[string]int32{
		"flood":    p.run("flood", "exec seq 1 700000").Pid,
		"parts":    p.run("parts", "i=0; while [ $i -lt 1500 ]; do printf 'line '; usleep 500; printf '%d\n' $i; i=$((i+1)); done").Pid,
		"terminal": p.run("terminal", "printf 'name? '; read line; echo got $line; exit 4", terminal).Pid,
		"stdin":    p.run("stdin", "read line; echo got $line; exit 5", func(_ *specs.Spec, r *api.CreateRequest) { r.Stdin = true }).Pid,
		"waits":    p.create("waits", "exit 6").Pid,
	}
	if err := p.ExecStart(t.Context(), "waits", "left", sh("sleep 7777"), false); err != nil { // its client goes
		t.Fatal(err)
	}
	for i := range 6 {
		id := fmt.Sprint("ends", i)
		p.run(id, fmt.Sprintf("usleep %d; echo last words; exit %d", i*60000, 20+i))
		if i%2 == 1 {
			if err := p.upgrade(anotherBuild(t, i)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if now := p.pid(); now != supervisor {
		t.Errorf("the supervisor is process %d, it was %d", now, supervisor)
	}
	p.wantNoZombies()
	for id, pid := range pids {
		if s, err := p.state(t.Context(), id); err != nil || s.Pid != pid || s.Adopted {
			t.Errorf("container %s, pid %d: %v, %v", id, pid, s, err)
		}
	}
	if err := p.Start(t.Context(), "waits"); err != nil {
		t.Error(err)
	}
	for _, id := range []string{"terminal", "stdin"} {
		fmt.Fprint(p.stream(id, "", api.Stdin), "word\n")
	}
	codes := map[string]int32{"terminal": 4, "stdin": 5, "waits": 6, "flood": 0, "parts": 0}
	for i := range 6 {
		codes[fmt.Sprint("ends", i)] = int32(20 + i)
	}
	for id, code := range codes {
		if e := p.awaitExit(t.Context(), id).Exit; !e.CodeKnown || e.Code != code {
			t.Errorf("exit of %s: %v, want %d", id, e, code)
		}
	}
	p.wantLogged("flood", api.Stdout, 700000, func(i int) string { return fmt.Sprintf("%d\n", i+1) })
	p.wantLogged("parts", api.Stdout, 1500, func(i int) string { return fmt.Sprintf("line %d\n", i) })
	if got, want := p.logged("terminal", api.Stdout), "name? word\r\ngot word\r\n"; got != want {
		t.Errorf("terminal: %q, want %q", got, want)
	}
	if got := p.logged("stdin", api.Stdout); got != "got word\n" {
		t.Errorf("stdin: %q", got)
	}
	for i := range 6 {
		if got := p.logged(fmt.Sprint("ends", i), api.Stdout); got != "last words\n" {
			t.Errorf("one that ended beside the upgrades: %q", got)
		}
	}
}

// A build that cannot take over leaves the old one serving, with its clients.
func TestUpgradeThatFails(t *testing.T) {
	p := startPod(t)
	p.run("c", "sleep 1000")
	attached := p.stream("c", "", api.Stdout)
	script := func(text string) string {
		path := filepath.Join(t.TempDir(), "program")
		if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
		return path
	}
	builds := map[string]struct{ program, says string }{
		"crashes":       {"/bin/false", "exit status 1"},
		"no program":    {script("what is this"), "exec format error"},
		"does not read": {script("#!/bin/sh\necho 'the state has version 7' >&2; exit 1"), ""},
		"is not there":  {"/no/such/program", "no such file"},
	}
	if os.Getenv("MINICRI_TEST_WHOLE") != "" { // it takes the 10 s that a build may take to look at the state
		builds["hangs"] = struct{ program, says string }{script("#!/bin/sh\nsleep 4321 & sleep 4321"), "no answer within 10s"}
	}
	for name, test := range builds {
		t.Run(name, func(t *testing.T) {
			before, err := p.Info(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			_, err = client.Upgrade(t.Context(), p.dir, test.program, "next")
			if err == nil || !strings.Contains(err.Error(), test.says) {
				t.Errorf("want an error that says %q: %v", test.says, err)
			}
			now, err := p.Info(t.Context()) // by the same connection
			if err != nil || now.GetBuild() != before.GetBuild() {
				t.Errorf("build %v, %v", now, err)
			}
			if r, err := p.ExecSync(t.Context(), "c", sh("echo hi"), 0, 10); err != nil || string(r.Stdout) != "hi\n" {
				t.Errorf("exec: %+v, %v", r, err)
			}
		})
	}
	if left, _ := exec.Command("pgrep", "-fx", "sleep 4321").Output(); len(left) > 0 {
		t.Errorf("a build that was asked has left processes: %s", left)
	}
	_ = attached.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	if _, err := attached.Read(make([]byte, 1)); err == nil || err == io.EOF {
		t.Errorf("the attached client was cut off: %v", err)
	}
}

// A supervisor of another state, of a later build, is refused by this one.
func TestUpgradeToAnOlderState(t *testing.T) {
	p := startPod(t)
	p.run("c", "sleep 1000")
	path := filepath.Join(p.dir, "records", "c.json")
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	newer := strings.Replace(string(content), `"version":1`, `"version":9`, 1)
	if err := os.WriteFile(path, []byte(newer), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := p.upgrade(anotherBuild(t, 1)); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "has version 9, and this build knows 1 at most") {
		t.Errorf("upgrade to a build that does not know the state: %v", err)
	}
	if err := os.WriteFile(path, content[:len(content)/2], 0o600); err != nil {
		t.Fatal(err)
	}
	if err := p.upgrade(anotherBuild(t, 3)); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "records/c.json") {
		t.Errorf("upgrade with a record that is cut off: %v", err)
	}
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := p.upgrade(anotherBuild(t, 2)); err != nil {
		t.Error(err)
	}
}

// A build that hangs as it looks at the state holds up neither the start of the daemon
// nor calls: both come to their end while it still does.
func TestUpgradeThatHangsHoldsUpNothing(t *testing.T) {
	p := startPod(t)
	p.run("c", "sleep 1000")
	p.run("reads", "cat >/dev/null; exit 7", func(_ *specs.Spec, r *api.CreateRequest) { r.Stdin, r.StdinOnce = true, true })
	input := p.stream("reads", "", api.Stdin)
	set, err := client.NewSet(client.SetOptions{Dir: filepath.Dir(p.dir), Start: client.StartOptions{Build: "next"}, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	hangs := filepath.Join(t.TempDir(), "program")
	pidFile := hangs + ".pid"
	if err := os.WriteFile(hangs, []byte("#!/bin/sh\necho $$ >"+pidFile+".new; mv "+pidFile+".new "+pidFile+"; exec sleep 4321\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	created := make(chan error, 1)
	go func() {
		pid := 0
		for deadline := time.Now().Add(time.Minute); pid == 0 && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
			content, _ := os.ReadFile(pidFile)
			_, _ = fmt.Sscan(string(content), &pid)
		}
		r, err := p.ExecSync(t.Context(), "c", sh("echo hi"), 0, 10)
		if err == nil && (pid == 0 || unix.Kill(pid, 0) != nil) {
			err = fmt.Errorf("a command was run when process %d had been given up: %+v", pid, r)
		}
		created <- errors.Join(err, input.CloseWrite(), endsBeside(t.Context(), p, "reads", pid))
	}()
	if err := set.Upgrade(t.Context(), hangs); err != nil {
		t.Error(err)
	}
	content, _ := os.ReadFile(pidFile)
	var pid int
	if _, err := fmt.Sscan(string(content), &pid); err != nil || unix.Kill(pid, 0) != nil {
		t.Errorf("the start waited for process %d, which hung, to be given up: %v", pid, err)
	}
	if err := <-created; err != nil {
		t.Error(err)
	}
	set.Close()
	if info, err := p.Info(t.Context()); err != nil || info.GetBuild() == "next" {
		t.Errorf("build %v, %v", info, err)
	}
}

// endsBeside waits for the end of a container, which has to come while a process runs.
func endsBeside(ctx context.Context, p *pod, id string, pid int) error {
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		c, err := p.state(ctx, id)
		if err != nil {
			return err
		}
		if unix.Kill(pid, 0) != nil {
			break
		}
		if c.Exit != nil {
			return nil
		}
	}
	return fmt.Errorf("container %s had not ended when process %d had been given up", id, pid)
}

// A build that reads the state and then dies in the place of the old one, or hangs
// there, leaves the old build serving, in another process: with logs, terminals,
// inputs and exits.
func TestUpgradeToABuildThatDoesNotServe(t *testing.T) {
	builds := map[string]string{"dies": "return 7"}
	if os.Getenv("MINICRI_TEST_WHOLE") != "" { // it takes the 10 s that a build may take to serve
		builds["hangs"] = "for (;;) pause()"
	}
	for name, does := range builds {
		t.Run(name, func(t *testing.T) { upgradeToWhatDoesNotServe(t, compiled(t, does)) })
	}
}

func upgradeToWhatDoesNotServe(t *testing.T, program string) {
	p := startPod(t)
	terminal := func(s *specs.Spec, r *api.CreateRequest) { s.Process.Terminal, r.Stdin = true, true }
	p.run("lines", "i=0; while [ $i -lt 1500 ]; do printf 'line '; usleep 500; printf '%d\n' $i; i=$((i+1)); done")
	p.run("terminal", "read line; echo got $line; exit 4", terminal)
	p.run("stdin", "read line; echo got $line; exit 5", func(_ *specs.Spec, r *api.CreateRequest) { r.Stdin = true })
	p.run("ends", "cat >/dev/null; exit 7", func(_ *specs.Spec, r *api.CreateRequest) { r.Stdin, r.StdinOnce = true, true })
	p.create("waits", "exit 6")
	for _, id := range []string{"lines", "stdin", "ends", "waits"} {
		defer client.HoldOutput(p.dir, id).Close() // as the daemon does
	}
	before, err := p.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	reapOrphans()
	_, err = client.Upgrade(t.Context(), p.dir, program, "next")
	if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "became build next") {
		t.Errorf("want an error that says what has become of build next: %v", err)
	}
	_ = p.Close()
	if p.Client, err = client.Connect(t.Context(), p.dir); err != nil {
		t.Fatal(err)
	}
	if now, err := p.Info(t.Context()); err != nil || now.GetBuild() != before.GetBuild() {
		t.Errorf("build %v, %v, before it was %v", now, err, before)
	}
	if err := p.Start(t.Context(), "waits"); err != nil {
		t.Error(err)
	}
	if r, err := p.ExecSync(t.Context(), "stdin", sh("echo hi"), 0, 10); err != nil || string(r.Stdout) != "hi\n" {
		t.Errorf("exec: %+v, %v", r, err)
	}
	for _, id := range []string{"terminal", "stdin"} {
		fmt.Fprint(p.stream(id, "", api.Stdin), "word\n")
	}
	// Its input ends: no other process has the write end of that.
	if err := p.stream("ends", "", api.Stdin).CloseWrite(); err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for id, code := range map[string]int32{"terminal": 4, "stdin": 5, "waits": 6, "ends": 7, "lines": 0} {
		if e := p.awaitExit(ctx, id).Exit; e.CodeKnown && e.Code != code {
			t.Errorf("exit of %s: %v, want %d", id, e, code)
		}
	}
	p.wantLogged("lines", api.Stdout, 1500, func(i int) string { return fmt.Sprintf("line %d\n", i) })
	if got, want := p.logged("terminal", api.Stdout), "word\r\ngot word\r\n"; got != want {
		t.Errorf("terminal: %q, want %q", got, want)
	}
	// The next build is none the worse for it, nor for a terminal that has ended.
	if err := p.upgrade(anotherBuild(t, 1)); err != nil {
		t.Error(err)
	}
}

// compiled is a program that can read every state, and as a supervisor does this.
func compiled(t *testing.T, does string) string {
	t.Helper()
	source, program := filepath.Join(t.TempDir(), "build.c"), filepath.Join(t.TempDir(), "build")
	text := fmt.Sprintf(`#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int main(int count, char **words) { if (count > 1 && !strcmp(words[1], "check-state")) return 0; %s; }
`, does)
	if err := os.WriteFile(source, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if said, err := exec.Command("gcc", "-o", program, source).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, said)
	}
	return program
}

// wantNoZombies waits until the supervisor has reaped what has ended: execs of
// before an upgrade, and its standby.
func (p *pod) wantNoZombies() {
	p.t.Helper()
	parent := fmt.Sprint(p.pid())
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		stats, _ := filepath.Glob("/proc/[0-9]*/stat")
		var left []string
		for _, path := range stats {
			stat, _ := os.ReadFile(path) // it may have ended
			name, rest, _ := strings.Cut(string(stat), ") ")
			if fields := strings.Fields(rest); len(fields) > 1 && fields[0] == "Z" && fields[1] == parent {
				left = append(left, name)
			}
		}
		if len(left) == 0 {
			return
		}
		if time.Now().After(deadline) {
			p.t.Fatalf("ended and not waited for: %q", left)
		}
	}
}
