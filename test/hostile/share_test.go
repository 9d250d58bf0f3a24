package hostile

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// flood sends small control frames, which cost the most for each byte, until the
// connection is closed: pings, which are answered, and settings. answered counts
// the bytes of the answers.
func flood(conn net.Conn, answered *atomic.Int64) {
	go func() {
		for buffer := make([]byte, 32<<10); ; {
			n, err := conn.Read(buffer)
			answered.Add(int64(n))
			if err != nil {
				return
			}
		}
	}()
	ping := []byte{0x80, 3, 0, 6, 0, 0, 0, 4, 0, 0, 0, 1}
	settings := []byte{0x80, 3, 0, 4, 0, 0, 0, 12, 0, 0, 0, 1, 0, 0, 0, 4, 0, 0, 0, 9}
	frames := bytes.Repeat(append(ping, settings...), 2048)
	for {
		if _, err := conn.Write(frames); err != nil {
			return
		}
	}
}

// roundTrips is how often a byte goes through a terminal-less cat and back
// within a time, and the longest that one took.
func roundTrips(t *testing.T, in io.Writer, out io.Reader, during time.Duration) (count int, slowest time.Duration) {
	t.Helper()
	answer := make([]byte, 1)
	for began := time.Now(); time.Since(began) < during; count++ {
		sent := time.Now()
		_, err := in.Write([]byte("x"))
		check(t, err)
		_, err = io.ReadFull(out, answer)
		check(t, err)
		slowest = max(slowest, time.Since(sent))
	}
	return count, slowest
}

// What is taken of a session that sends control frames as fast as it can is
// bounded, so that others, and the CRI, have their share of the processors. The
// bound is one of frames for a time, which holds on any machine and beside any
// load; what another session gets is the machine's too: a ninth were fair.
//
// attack: clients: eight sessions send pings and settings as fast as they can
// held: 16 frames of each are taken in a millisecond; another session makes at least a fortieth of the round trips that it makes alone (a ninth were fair), and the CRI answers
func TestASessionHasItsShareOfTheProcessors(t *testing.T) {
	const floods, during, frames, frame = 8, 2 * time.Second, 16, 12
	p := newTarget(t, "")
	c := p.upgrade(p.exec("cat"), "v4.channel.k8s.io")
	c.open(t, "error", 0, 0)
	in := c.open(t, "stdin", 0, 0)
	out := c.open(t, "stdout", 0, 0)
	c.open(t, "stderr", 0, 0)
	alone, slowestAlone := roundTrips(t, in, out, during)
	answered := make([]atomic.Int64, floods)
	began := time.Now()
	for i := range floods {
		conn := p.upgradeRaw(p.exec("sleep", "1000"), "v4.channel.k8s.io")
		defer conn.Close()
		go flood(conn, &answered[i])
	}
	beside, slowest := roundTrips(t, in, out, during)
	asked := time.Now()
	_, err := p.Runtime.Version(limited(t), &runtimeapi.VersionRequest{})
	check(t, err)
	t.Logf("alone %d round trips, slowest %v; beside %d floods %d, slowest %v; Version answered in %v",
		alone, slowestAlone, floods, beside, slowest, time.Since(asked))
	if beside < alone/40 {
		t.Errorf("%d round trips beside %d floods, %d alone", beside, floods, alone)
	}
	for i := range answered {
		// Every second frame is a ping. The first ones come in a burst.
		taken := 2 * answered[i].Load() / frame
		most := frames * (time.Since(began).Milliseconds() + 100)
		t.Logf("flood %d: %d frames of at most %d", i, taken, most)
		if taken == 0 || taken > most {
			t.Errorf("flood %d: %d frames were taken, want some and at most %d", i, taken, most)
		}
	}
}

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
