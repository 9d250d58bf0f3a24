package client

import (
	"testing"

	"github.com/minicri/minicri/test/harness"
)

// Commands that write much cost the others nothing, and their memory is returned.
//
// attack: denial of service: commands of ExecSync write 16 MiB each and do not end
// held: all outputs together take 64 MiB; the largest is cut, and the log has a line about it
func TestCaptured(t *testing.T) {
	returned := 0
	all := &Captured{later: func(func()) { returned++ }}
	chunk := make([]byte, 32<<10)
	write := func(k *capture, bytes int) {
		for range bytes / len(chunk) {
			all.add(k, &k.Stdout, chunk)
		}
	}
	var greedy []*capture
	for range 6 {
		k := &capture{all: all, limit: 16 << 20}
		greedy = append(greedy, k)
		write(k, 20<<20)
		harness.Want(t, k.Cut && all.bytes <= maxCaptured, "%d bytes of %d", k.held, all.bytes)
	}
	modest := &capture{all: all, limit: 16 << 20}
	write(modest, 4<<20)
	all.add(modest, &modest.Stderr, []byte("error"))
	kept := modest.result()
	whole := !kept.Cut && len(kept.Stdout) == 4<<20 && string(kept.Stderr) == "error"
	harness.Want(t, whole && all.bytes <= maxCaptured,
		"%d bytes, cut %t", modest.held, kept.Cut)
	held := 0
	for _, k := range append(greedy, modest) {
		harness.Want(t, k.held >= sureCaptured/2, "a capture has %d bytes", k.held)
		held += len(k.Stdout) + len(k.Stderr)
	}
	harness.Same(t, "bytes of all", all.bytes, held)
	for _, k := range append(greedy, modest) {
		k.release()
		k.release()
	}
	none := all.bytes == 0 && len(all.all) == 0
	harness.Want(t, none && returned == 1, "%d bytes, memory returned %d times", all.bytes, returned)
	write(modest, 1<<20)
	modest.release()
	harness.Same(t, "times memory was returned", returned, 1)
}
