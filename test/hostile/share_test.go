package hostile

import (
	"bytes"
	"io"
	"net"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// flood sends small control frames, which cost the most for each byte, until the
// connection is closed: pings, which are answered, and settings. What is answered
// is taken and dropped.
func flood(conn net.Conn) {
	go func() { _, _ = io.Copy(io.Discard, conn) }()
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

// Sessions that send as much as they can leave the others, and the CRI, their
// share of the processors: what a session gets is measured alone, and beside
// them.
//
// attack: clients: eight sessions send pings and settings as fast as they can
// held: another session makes at least a fortieth of the round trips that it makes alone (fair were a ninth), and the CRI answers; the test is not in `make test` (docs/crash.md)
func TestASessionHasItsShareOfTheProcessors(t *testing.T) {
	const floods, during = 8, 2 * time.Second
	p := newTarget(t, "")
	c := p.upgrade(p.exec("cat"), "v4.channel.k8s.io")
	c.open(t, "error", 0, 0)
	in := c.open(t, "stdin", 0, 0)
	out := c.open(t, "stdout", 0, 0)
	c.open(t, "stderr", 0, 0)
	alone, slowestAlone := roundTrips(t, in, out, during)
	var flooding []net.Conn
	for range floods {
		conn := p.upgradeRaw(p.exec("sleep", "1000"), "v4.channel.k8s.io")
		flooding = append(flooding, conn)
		go flood(conn)
	}
	beside, slowest := roundTrips(t, in, out, during)
	asked := time.Now()
	_, err := p.Runtime.Version(limited(t), &runtimeapi.VersionRequest{})
	check(t, err)
	answered := time.Since(asked)
	for _, conn := range flooding {
		conn.Close()
	}
	// Once more, because other processes want the machine too: the least counts.
	after, _ := roundTrips(t, in, out, during)
	t.Logf("alone %d and %d round trips, slowest %v; beside %d floods %d (%.2f), slowest %v; Version answered in %v",
		alone, after, slowestAlone, floods, beside, float64(beside)/float64(min(alone, after)), slowest, answered)
	if least := min(alone, after); beside < least/40 {
		t.Errorf("%d round trips beside %d floods, %d alone", beside, floods, least)
	}
}
