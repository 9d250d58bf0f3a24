package container

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

// What a process has written is not there for it to read, and its streams can be opened
// by their names, as an image does that logs to a link to /dev/stdout: a container's and
// a command's, as every user, also in a user namespace.
func TestStreamsOfEveryUser(t *testing.T) {
	n := newNode(t)
	// Descriptors 5 and 6 are as 1 and 2, which head writes to.
	const script = "exec 5>&1 6>&2; rm -f /tmp/log; ln -s /dev/stdout /tmp/log; echo out >> /tmp/log; echo err > /dev/stderr; " +
		"for fd in 5 6; do timeout 5 head -c 1 0<&$fd && echo read from $fd || echo not read from $fd; done"
	const want = "out\nnot read from 5\nnot read from 6\n"
	for name, users := range map[string][]harness.PodOption{"node": nil, "own": {harness.UserNamespace}} {
		p := runPod(t, n, name, users...)
		for _, uid := range []int64{0, 1000} {
			id := p.run(fmt.Sprint("app-", uid), script+"; echo done; exec sleep 1000000", asUser(uid))
			eventually(t, "it has tried", func() bool {
				stdout, _ := p.logs(id)
				return strings.HasSuffix(stdout, "done\n")
			})
			stdout, stderr := p.logs(id)
			if stdout != want+"done\n" || !strings.HasPrefix(stderr, "err\n") {
				t.Errorf("user namespace %s, user %d: %q, %q", name, uid, stdout, stderr)
			}
			answer, err := p.tryExec(id, 0, "/bin/sh", "-c", script)
			check(t, err)
			if string(answer.Stdout) != want || !strings.HasPrefix(string(answer.Stderr), "err\n") {
				t.Errorf("user namespace %s, user %d, a command: %v", name, uid, answer)
			}
		}
		n.RemovePod(p.id)
	}
}

func fileSize(t *testing.T, path string) int64 {
	t.Helper()
	info, err := os.Stat(path)
	check(t, err)
	return info.Size()
}

// A container writes on while its supervisor does not live, however short, and then, when
// the next one reads, while the daemon does not, and nothing of it is lost, nor the last
// words of one that ends meanwhile.
func TestWritersOutliveTheirSupervisor(t *testing.T) {
	p := newPod(t)
	const writes = "i=0; until test -e /enough; do echo out $i; echo err $i >&2; i=$((i+1)); usleep 2000; done; echo end"
	id := p.run("app", writes)
	for round := range 2 {
		ends := p.run(fmt.Sprint("ends-", round), "usleep 300000; echo last words; exit 7")
		p.awaitLine(id, fmt.Sprint("out ", 20*round))
		p.killShim()
		p.wantExit(ends, 7, "Error")
		if stdout, _ := p.logs(ends); stdout != "last words\n" {
			t.Errorf("round %d: of a container that ended meanwhile: %q", round, stdout)
		}
		path := p.status(id).LogPath
		stdout, stderr := p.logs(id)
		eventually(t, "both outputs are read", func() bool {
			o, e := p.logs(id)
			return len(o) > len(stdout) && len(e) > len(stderr)
		})
		p.Kill()
		before := fileSize(t, path)
		eventually(t, "the log grows without a daemon", func() bool { return fileSize(t, path) > before })
		p.Start()
		eventually(t, "the container is known to run", func() bool { return p.status(id).State == running })
	}
	p.awaitLine(id, "out 100")
	p.exec(id, "touch /enough")
	p.wantExit(id, 0, "Completed")
	stdout, stderr := p.logs(id)
	lines := strings.Count(stderr, "\n")
	for _, stream := range []struct{ name, got, end string }{{"out", stdout, "end\n"}, {"err", stderr, ""}} {
		var all strings.Builder
		for i := range lines {
			all.WriteString(stream.name + " " + strconv.Itoa(i) + "\n")
		}
		same(t, "std"+stream.name, stream.got, all.String()+stream.end)
	}
	if lines < 100 {
		t.Errorf("only %d lines", lines)
	}
}
