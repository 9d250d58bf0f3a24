package container

import (
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

func logPath(path string) option { return func(c *runtimeapi.ContainerConfig) { c.LogPath = path } }

func (p *pod) reopen(id string) error {
	return nodetest.Err(p.t, p.Runtime.ReopenContainerLog, &runtimeapi.ReopenContainerLogRequest{ContainerId: id})
}

func TestLogFormat(t *testing.T) {
	p := newPod(t)
	const long = 40000
	id := p.run("app", fmt.Sprintf("echo out; echo err >&2; head -c %d /dev/zero | tr '\\0' x; echo; printf 'no end'", long))
	p.wantExit(id, 0, "Completed")
	stdout, stderr := p.logs(id)
	same(t, "stdout", stdout, "out\n"+strings.Repeat("x", long)+"\nno end") // nothing is added to it
	same(t, "stderr", stderr, "err\n")
	data := harness.Read(t, p.status(id).LogPath)
	same(t, "partial lines: 2 of the long one, and the last", strings.Count(string(data), " stdout P "), 3)
	for line := range strings.Lines(string(data)) {
		_, err := time.Parse(time.RFC3339Nano, strings.Fields(line)[0])
		expect(t, err == nil && len(line) <= 16<<10+100, "a line of %d bytes, time: %v", len(line), err)
	}
	id = p.run("none", "echo x", noLog)
	p.wantExit(id, 0, "Completed")
	path := p.status(id).LogPath
	expect(t, path != "", "an empty log path: the kubelet would remove whatever begins with it")
	_, err := os.Stat(path)
	expect(t, os.IsNotExist(err), "there is %s: %v", path, err)
}

// numbered makes a file of numbered lines, each longest of them so long, and returns its content.
func numbered(t *testing.T, file string, size, longest int) string {
	filler := strings.Repeat("x", longest)
	var text strings.Builder
	for line := 0; text.Len() < size; line++ {
		length := min(150+line%100, longest)
		if line%2000 == 0 {
			length = longest
		}
		fmt.Fprintf(&text, "%d %s\n", line, filler[:length])
	}
	check(t, os.WriteFile(file, []byte(text.String()), 0o644))
	return text.String()
}

// The container writes as fast as it can, which is more than 100 MiB/s on a machine that does little else, while
// the log is renamed and reopened. Some lines are longer than an entry of the log.
func TestP39_RotationLosesNothing(t *testing.T) {
	p := newPod(t)
	exchange := t.TempDir()
	want := numbered(t, filepath.Join(exchange, "lines"), 8<<20, 40000)
	id := p.run("app", "cat /x/lines; until test -e /x/enough; do cat /x/lines; done", mounted(exchange, "/x"))
	path := p.status(id).LogPath
	var files []string
	for i := range 8 { // as the kubelet rotates
		harness.Eventually(t, "the container has written", func() bool { return fileSize(t, path) > 0 })
		files = append(files, fmt.Sprintf("%s.%d", path, i))
		check(t, os.Rename(path, files[i]))
		check(t, p.reopen(id))
	}
	check(t, os.WriteFile(filepath.Join(exchange, "enough"), nil, 0o644))
	p.wantExit(id, 0, "Completed")
	var got strings.Builder
	for _, file := range append(files, path) {
		stdout, _ := p.readLog(file)
		got.WriteString(stdout)
	}
	times := got.Len() / len(want)
	all := strings.Repeat(want, times)
	expect(t, times != 0 && got.String() == all, "%d bytes in %d files, want %d", got.Len(), len(files)+1, len(all))
}

// A log that the disk has no room for: the container continues, what is in the log
// is whole and in order, and what is not is counted there when there is room.
func TestP39_FullDisk(t *testing.T) {
	const room, size = 1 << 20, 8 << 20
	n := newNode(t)
	small, exchange := t.TempDir(), t.TempDir()
	check(t, unix.Mount("small", small, "tmpfs", 0, fmt.Sprintf("size=%d", room)))
	t.Cleanup(func() { check(t, unix.Unmount(small, unix.MNT_DETACH)) })
	want := numbered(t, filepath.Join(exchange, "lines"), size, 250)
	p := runPod(t, n, "web", func(c *runtimeapi.PodSandboxConfig) { c.LogDirectory = filepath.Join(small, "logs") })
	id := p.run("app", "cat /x/lines; touch /x/written; until test -e /x/room; do sleep 0.02; done; echo after; exit 7", mounted(exchange, "/x"))
	written := filepath.Join(exchange, "written")
	harness.Eventually(t, "the container has written everything", func() bool { _, err := os.Stat(written); return err == nil })
	same(t, "state on a full disk", p.status(id).State, running)
	same(t, "exec", p.exec(id, "echo here"), "here")
	check(t, unix.Mount("small", small, "tmpfs", unix.MS_REMOUNT, fmt.Sprintf("size=%d", 2*size)))
	check(t, os.WriteFile(filepath.Join(exchange, "room"), nil, 0o644))
	p.wantExit(id, 7, "Error")
	stdout, stderr := p.logs(id)
	logged, after := strings.CutSuffix(stdout, "after\n")
	expect(t, after, "what was written when there was room again is not in the log")
	missing := missingLines(t, want, logged)
	expect(t, missing != 0, "no line is missing: the disk was not full")
	same(t, "lines that are lost, by the log", lostLines(t, stderr), missing)
}

// missingLines fails the test unless all that was logged are whole lines of what
// was written, in order, and returns how many are not there.
func missingLines(t *testing.T, written, logged string) (missing int) {
	next, stop := iter.Pull(strings.Lines(logged))
	defer stop()
	line, more := next()
	for one := range strings.Lines(written) {
		if more && one == line {
			line, more = next()
			continue
		}
		missing++
	}
	expect(t, !more, "in the log is %q, which was not written or not there", line)
	return missing
}

func lostLines(t *testing.T, stderr string) (sum int) {
	for line := range strings.Lines(stderr) {
		var lines, size int
		_, err := fmt.Sscanf(line, "minicri: %d log lines (%d bytes) were lost:", &lines, &size)
		expect(t, err == nil && strings.Contains(line, unix.ENOSPC.Error()), "%q: %v", line, err)
		sum += lines
	}
	return sum
}

// Who can write to the directory of logs, as log agents can, leads the node to no other file by a link, and holds
// up no one by a fifo: neither when a container is made nor when its log is reopened.
func TestLogsAreFiles(t *testing.T) {
	p := newPod(t)
	target := filepath.Join(t.TempDir(), "target")
	check(t, os.WriteFile(target, []byte("precious"), 0o600))
	check(t, os.MkdirAll(p.config.LogDirectory, 0o755))
	id := p.run("app", "echo first; until test -e /enough; do sleep 0.02; done; echo last", logPath("real.log"))
	p.awaitLine(id, "first")
	path := p.status(id).LogPath
	for kind, put := range harness.Sorted(map[string]func(string) error{
		"link": func(path string) error { return os.Symlink(target, path) },
		"fifo": func(path string) error { return unix.Mkfifo(path, 0o600) },
	}) {
		place := filepath.Join(p.config.LogDirectory, kind)
		check(t, put(place))
		evil := shell("app", "echo evil", attempt(1), logPath(kind))
		wantRefused(t, p.createErr(evil), place)
		check(t, os.Rename(path, path+"."+kind))
		check(t, put(path))
		wantCode(t, p.reopen(id), codes.InvalidArgument)
		check(t, os.Remove(path))
		check(t, os.Rename(path+"."+kind, path))
	}
	p.linksOfTheLogDirectory(id, filepath.Dir(target))
	p.letEnd(id)
	p.wantExit(id, 0, "Completed")
	stdout, _ := p.logs(id)
	same(t, "the log that continues", stdout, "first\nlast\n")
	same(t, "the target of the link", string(harness.Read(t, target)), "precious")
}

// linksOfTheLogDirectory puts symbolic links to another directory in the places
// of the pod's directory of logs and of one in it: none is followed.
func (p *pod) linksOfTheLogDirectory(id, elsewhere string) {
	directory, away := p.config.LogDirectory, p.config.LogDirectory+".away"
	sibling := directory + ".sibling"
	check(p.t, os.Mkdir(sibling, 0o755))
	for _, to := range []string{elsewhere, "../" + filepath.Base(sibling)} {
		link := filepath.Join(directory, "sub")
		check(p.t, os.Symlink(to, link))
		for _, path := range []string{"sub/app.log", "sub/made/app.log"} {
			wantError(p.t, p.createErr(shell("sub", "echo evil", logPath(path))), "symbolic link")
		}
		check(p.t, os.Remove(link))
	}
	check(p.t, os.Rename(directory, away))
	for _, to := range []string{elsewhere, filepath.Base(sibling)} {
		check(p.t, os.Symlink(to, directory))
		wantError(p.t, p.reopen(id), "symbolic link")
		for _, path := range []string{"pod.log", "made/pod.log"} {
			wantError(p.t, p.createErr(shell("pod", "echo evil", logPath(path))), "symbolic link")
		}
		check(p.t, os.Remove(directory))
	}
	check(p.t, os.Rename(away, directory))
	check(p.t, os.Remove(sibling)) // it is empty
	entries, err := os.ReadDir(elsewhere)
	check(p.t, err)
	same(p.t, "files behind the links", len(entries), 1)
}

// What a process has written is not there for it to read, and its streams can be opened by their names, as an image
// does that logs to a link to /dev/stdout: a container's and a command's, as every user, also in a user namespace.
func TestStreamsOfEveryUser(t *testing.T) {
	n := newNode(t)
	// Descriptors 5 and 6 are as 1 and 2, which head writes to.
	const script = "exec 5>&1 6>&2; rm -f /tmp/log; ln -s /dev/stdout /tmp/log; echo out >> /tmp/log; echo err > /dev/stderr; " +
		"for fd in 5 6; do timeout 5 head -c 1 0<&$fd && echo read from $fd || echo not read from $fd; done"
	const want = "out\nnot read from 5\nnot read from 6\n"
	for name, users := range harness.Sorted(map[string][]nodetest.PodOption{"node": nil, "own": {nodetest.UserNamespace}}) {
		p := runPod(t, n, name, users...)
		for _, uid := range []int64{0, 1000} {
			id := p.run(fmt.Sprint("app-", uid), script+"; echo done; exec sleep 1000000", asUser(uid))
			harness.Eventually(t, "it has tried", func() bool { o, e := p.logs(id); return strings.HasSuffix(o, "done\n") && e != "" })
			stdout, stderr := p.logs(id)
			answer, err := p.tryExec(id, 0, "/bin/sh", "-c", script)
			check(t, err)
			who := fmt.Sprintf("user namespace %s, user %d: ", name, uid)
			same(t, who+"outputs", []string{stdout, string(answer.Stdout)}, []string{want + "done\n", want})
			for _, got := range []string{stderr, string(answer.Stderr)} {
				expect(t, strings.HasPrefix(got, "err\n"), "%serror output %q", who, got)
			}
		}
		n.RemovePod(p.id)
	}
}

func fileSize(t *testing.T, path string) int64 {
	info, err := os.Stat(path)
	check(t, err)
	return info.Size()
}
