package runner

import (
	"strings"
	"testing"
	"unicode/utf8"
)

// FuzzNote reads what a plugin of any kind has answered and written, as the
// runner notes it. Results of success are parsed by libcni; what is parsed here
// are errors, and the frame around both.
func FuzzNote(f *testing.F) {
	for _, seed := range []string{
		"",
		"bridge\x00ADD\x001700000000000000000\x00",
		"bridge\x00ADD\x001700000000000000000\x000\x000\x005000\x002\x000\x00{}",
		"portmap\x00DEL\x001700000000000000000\x001\x000\x005000\x0032\x005\x00{\"code\":11,\"msg\":\"try again\"}\n\n\nwords",
		"a\x00DEL\x001\x001\x009\x001\x0099999999999999999\x000\x00{",
		"a\x00DEL\x001\x001\x009\x001\x00-1\x000\x00{",
		"a\x00DEL\x001\x001\x009\x001\x001\x00-1\x00{",
		"a\x00DEL\x001\x001\x009\x001\x009223372036854775807\x009223372036854775807\x00{",
		"a\x00ADD\x00x\x00",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := parseNote(data)
		if err != nil {
			return
		}
		if r.Ended && !strings.Contains(string(data), r.Stderr) {
			t.Errorf("stderr %q is not of the note", r.Stderr)
		}
		if len(r.Message) > 8*len(data)+64 || utf8.Valid(data) && !utf8.ValidString(r.Message) {
			t.Errorf("%d bytes became the message %q", len(data), r.Message)
		}
	})
}
