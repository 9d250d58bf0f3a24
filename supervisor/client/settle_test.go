package client_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/test/harness"
)

// The end of a container is seen while the successor still ends commands in others that
// cannot be ended: they sleep uninterruptibly.
func TestExitsBesideExecsThatCannotBeEnded(t *testing.T) {
	p := startPod(t)
	disk := t.TempDir()
	freeze := harness.Disk(t, disk)
	thaw := freeze()
	hang := []string{"hangs0", "hangs1"} // each for as many times the limit of one command
	for _, id := range hang {
		p.run(id, "sleep 1000", func(s *specs.Spec, _ *api.CreateRequest) {
			s.Mounts = append(s.Mounts, specs.Mount{Destination: "/disk", Type: "bind", Source: disk, Options: []string{"bind"}})
		})
		p.hangs(id, 10)
	}
	ending := make(map[string]int32)
	for i := range 10 {
		id := fmt.Sprint("ends", i)
		ending[id] = p.run(id, stays).Pid
	}
	p.succeed()
	for _, pid := range ending {
		p.check(unix.Kill(int(pid), unix.SIGKILL))
	}
	for id := range ending {
		p.awaitExit(t.Context(), id)
	}
	for _, id := range hang { // notes are what a successor ends commands by
		notes, _ := filepath.Glob(filepath.Join(p.dir, "containers", id, "*exec-*"))
		harness.Want(t, len(notes) != 0, "ends of others were seen when the commands of %s had been given up", id)
	}
	thaw()
	for _, id := range hang {
		p.eventually("commands of before end in "+id, func() bool { return len(p.processes(id)) == 1 })
	}
}

// hangs runs commands in a container that write to a frozen disk, and waits until they sleep uninterruptibly.
func (p *pod) hangs(id string, commands int) {
	for i := range commands {
		p.t.Cleanup(p.exec(id, "echo > /disk/file", i%2 == 0).Close)
	}
	p.eventually("all commands of "+id+" hang", func() bool {
		sleeping := 0
		for _, pid := range p.processes(id) {
			if processState(pid) == "D" {
				sleeping++
			}
		}
		return sleeping == commands
	})
}

// A log on a disk that hangs keeps a successor neither from serving nor from seeing how
// its container ends; what was written meanwhile is in the log when the disk goes on.
//
// attack: denial of service: the disk of a container's log hangs
// held: only that log is delayed; the end of the container is seen, and it can be stopped and removed
func TestSuccessorBesideALogThatHangs(t *testing.T) {
	disk := t.TempDir()
	freeze := harness.Disk(t, disk) // its end comes after that of the pod, which has files there
	p := startPod(t)
	onDisk := func(_ *specs.Spec, r *api.CreateRequest) { r.LogPath = filepath.Join(disk, r.Id) }
	pid := p.run("c", "trap 'echo last; exit 7' TERM; echo first; "+stays, onDisk).Pid
	p.run("other", stays, onDisk)
	p.awaitFile(disk+"/c", "first")
	thaw := freeze()
	p.succeed()
	p.wantExec("other", "echo hi", "hi\n")
	p.check(unix.Kill(int(pid), unix.SIGTERM))
	e := p.awaitExit(t.Context(), "c").Exit
	harness.Want(t, !e.CodeKnown || e.Code == 7, "exit %v, want 7", e)
	thaw()
	p.awaitFile(disk+"/c", "last")
	p.wantExec("other", "echo hi", "hi\n")
}

// A container has ended, and its last words wait for a disk, in the spool and in the fifo, when its
// supervisor is killed and the daemon lets go of it, which has heard of the end: they come to the log.
func TestLastWordsOutliveTheSupervisor(t *testing.T) {
	disk := t.TempDir()
	freeze := harness.Disk(t, disk)
	p := startPod(t)
	log := disk + "/c"
	script := "trap 'echo begun; sleep 1; seq 1 9000; echo last >&2; exit 7' TERM; echo first; " + stays
	pid := p.run("c", script, func(_ *specs.Spec, r *api.CreateRequest) { r.LogPath = log }).Pid
	p.awaitFile(log, "first")
	thaw := freeze()
	p.check(unix.Kill(int(pid), unix.SIGTERM))
	p.awaitExit(t.Context(), "c")
	p.held["c"].Release()
	p.killShim()
	thaw()
	p.restart()
	e := p.awaitExit(t.Context(), "c").Exit
	harness.Want(t, e.Code == 7 && e.CodeKnown, "the successor says exit %v, want 7", e)
	p.awaitFile(log, "stderr F last")
	p.awaitFile(log, "stdout F 9000")
	p.eventually("a successor has nothing to look for", func() bool { return count(t, p.dir+"/io") == 0 })
}

// logged is what a stream of a container has in the whole lines of its log, byte for byte.
func (p *pod) logged(id, stream string) string {
	content, err := os.ReadFile(p.logPath(id))
	p.check(err)
	var text strings.Builder
	for line := range strings.Lines(string(content)) {
		if !strings.HasSuffix(line, "\n") {
			break // it is being written
		}
		fields := strings.SplitN(line, " ", 4)
		harness.Need(p.t, len(fields) >= 4, "log line %q", line)
		if fields[1] != stream {
			continue
		}
		if fields[2] == "P" {
			fields[3] = strings.TrimSuffix(fields[3], "\n")
		}
		text.WriteString(fields[3])
	}
	return text.String()
}

// A supervisor that is killed again and again while containers write as fast as they can, long lines, and lines in
// parts, loses no byte of what they wrote, and no byte is there twice.
func TestKilledShimLosesNoByte(t *testing.T) {
	p := startPod(t)
	p.run("flood", "exec seq 1 600000")
	p.run("both", "i=0; while [ $i -lt 20000 ]; do echo out $i; echo err $i >&2; i=$((i+1)); done")
	p.run("parts", "i=0; while [ $i -lt 1500 ]; do printf 'line '; usleep 500; printf '%d\n' $i; i=$((i+1)); done")
	p.run("long", "i=0; while [ $i -lt 100 ]; do head -c 50000 /dev/zero | tr '\\0' x; echo $i; i=$((i+1)); done")
	for range 20 { // or until all have ended
		before := len(p.log("parts"))
		p.eventually("more is written", func() bool { return len(p.log("parts")) > before || !p.runs("parts") })
		p.killShim()
		p.restart()
		reapOrphans()
	}
	p.wantLogged("flood", api.Stdout, 600000, func(i int) string { return fmt.Sprintf("%d\n", i+1) })
	p.wantLogged("both", api.Stdout, 20000, func(i int) string { return fmt.Sprintf("out %d\n", i) })
	p.wantLogged("both", api.Stderr, 20000, func(i int) string { return fmt.Sprintf("err %d\n", i) })
	p.wantLogged("parts", api.Stdout, 1500, func(i int) string { return fmt.Sprintf("line %d\n", i) })
	long := strings.Repeat("x", 50000)
	p.wantLogged("long", api.Stdout, 100, func(i int) string { return fmt.Sprintf("%s%d\n", long, i) })
}

// restart starts a successor once the one that was killed is gone.
func (p *pod) restart() {
	p.eventually("a successor starts", func() bool {
		successor, err := start(p.t.Context(), p.dir)
		if err == nil {
			_ = p.Close()
			p.Client = successor
		}
		harness.Need(p.t, err == nil || errdefs.IsUnavailable(err), "%v", err)
		return err == nil
	})
}

func (p *pod) runs(id string) bool {
	state, err := p.state(p.t.Context(), id)
	p.check(err)
	return state.Exit == nil
}

// wantLogged compares piece by piece once all is there, and says where the log differs first.
func (p *pod) wantLogged(id, stream string, count int, piece func(int) string) {
	p.t.Helper()
	size := 0
	for i := range count {
		size += len(piece(i))
	}
	rest := p.awaitLogged(id, stream, size)
	for i := range count {
		var ok bool
		if rest, ok = strings.CutPrefix(rest, piece(i)); !ok {
			p.t.Errorf("%s of %s differs at line %d of %d: %.200q, want %.60q", stream, id, i, count, rest, piece(i))
			return
		}
	}
	harness.Want(p.t, rest == "", "%s of %s: more than was written: %.200q", stream, id, rest)
}

// awaitLogged waits until as many bytes of a stream are in the log, and returns all: an exit is told half a second
// after it, also when not all of the output has been read.
func (p *pod) awaitLogged(id, stream string, size int) (logged string) {
	p.eventually(fmt.Sprintf("%d bytes of %s are in the log of %s", size, stream, id), func() bool {
		logged = p.logged(id, stream)
		return len(logged) >= size
	})
	return logged
}
