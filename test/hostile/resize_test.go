package hostile

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// attack: clients: four sessions with a terminal send frames of 1 MiB of sizes as fast as they can
// held: the daemon takes less than a tenth of a processor for them; the terminal has the last size that was sent
// field: containerd and CRI-O decode and set every one
func TestSizesOfATerminalAreCoalesced(t *testing.T) {
	const sessions, during = 4, 6 * time.Second
	p := newTarget(t, "")
	flood := bytes.Repeat([]byte(`{"Width":80,"Height":24}`+"\n"), 1<<20/25)
	for range sessions {
		c, resize, _ := p.terminal(t, "sleep", "1000")
		defer c.raw.Close()
		go func() {
			for {
				if _, err := resize.Write(flood); err != nil {
					return
				}
			}
		}()
	}
	before := cpuTime(t, p.PID())
	began := time.Now()
	_, resize, output := p.terminal(t, "sh", "-c", "until stty size 2>/dev/null | grep -q '^37 91$'; do sleep 0.1; done; echo as wanted; sleep 1000")
	for i := range 100 {
		_, err := fmt.Fprintf(resize, `{"Width":%d,"Height":24}`+"\n", 100+i)
		check(t, err)
	}
	_, err := resize.Write([]byte(`{"Width":91,"Height":37}`))
	check(t, err)
	seen := make([]byte, len("as wanted"))
	_, err = io.ReadFull(output, seen)
	check(t, err)
	if string(seen) != "as wanted" {
		t.Errorf("the terminal says %q", seen)
	}
	t.Logf("the last size came after %v", time.Since(began))
	time.Sleep(during - min(during, time.Since(began)))
	used, took := cpuTime(t, p.PID())-before, time.Since(began)
	t.Logf("the daemon used %v in %v", used, took)
	if used > took/10 {
		t.Errorf("the daemon used %v in %v", used, took)
	}
}

// terminal runs a command with a terminal, and returns its streams.
func (p *target) terminal(t *testing.T, command ...string) (c spdyClient, resize io.Writer, output io.Reader) {
	t.Helper()
	answer, err := p.Runtime.Exec(limited(t), &runtimeapi.ExecRequest{ContainerId: p.container, Cmd: command, Stdin: true, Stdout: true, Tty: true})
	check(t, err)
	c = p.upgrade(answer.Url, "v4.channel.k8s.io")
	c.open(t, "error", 0, 0)
	c.open(t, "stdin", 0, 0)
	output = c.open(t, "stdout", 0, 0)
	return c, c.open(t, "resize", 0, 0), output
}

// cpuTime is what a process has used of processors (proc_pid_stat(5)).
func cpuTime(t testing.TB, pid int) time.Duration {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	check(t, err)
	_, rest, _ := strings.Cut(string(data), ") ")
	fields := strings.Fields(rest)
	total := 0
	for _, field := range fields[11:13] {
		ticks, err := strconv.Atoi(field)
		check(t, err)
		total += ticks
	}
	return time.Duration(total) * time.Second / 100
}
