package stream

import (
	"fmt"
	"testing"

	"k8s.io/cri-streaming/pkg/streaming/remotecommand"

	"github.com/minicri/minicri/test/harness"
)

// attack: clients: a session with a terminal sends sizes as fast as it can
// held: of what has come the last one is set, and none of the others
// field: containerd and CRI-O decode and set every one
func TestLastSize(t *testing.T) {
	for text, want := range map[string]struct {
		size *remotecommand.TerminalSize
		rest string
	}{
		``:                                {nil, ""},
		`{"Width":80,"Height":24}` + "\n": {&remotecommand.TerminalSize{Width: 80, Height: 24}, "\n"},
		`{"Width":1,"Height":2}{"Width":3,"Height":4`: {&remotecommand.TerminalSize{Width: 1, Height: 2}, `{"Width":3,"Height":4`},
		`"Height":9}{"Width":3,"Height":4}`:           {&remotecommand.TerminalSize{Width: 3, Height: 4}, ""},
		`no size}`:                                    {nil, ""},
		`{"Width":"wide"}{`:                           {nil, "{"},
		`{"Width":70000}`:                             {nil, ""},
	} {
		size, rest := lastSize([]byte(text))
		harness.Want(t, fmt.Sprint(size) == fmt.Sprint(want.size) && string(rest) == want.rest,
			"%q: %v and %q, want %v and %q", text, size, rest, want.size, want.rest)
	}
	_, rest := lastSize(make([]byte, 1<<20))
	harness.Want(t, len(rest) == largestSize, "%d bytes are kept", len(rest))
}
