package hostile

import (
	"bytes"
	"io"
	"net"
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
