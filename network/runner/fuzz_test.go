package runner

import (
	"testing"
	"unicode/utf8"

	"github.com/minicri/minicri/internal/step"
)

// FuzzAnswer reads what a plugin that failed has printed. Results of success are
// parsed by libcni; what is parsed here are errors.
func FuzzAnswer(f *testing.F) {
	for _, seed := range []string{
		"", "{}", `{"code":11,"msg":"try again"}`, `{"code":-1}`, `{"code":"11","msg":5}`, "[", "null", "\xff\x00", `{"msg":"\u0000\u001b[2J","details":"d"}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		r := Report{Plugin: step.Plugin{Exit: 1}}
		r.takeError(data)
		if text := r.Text(); text == "" || !utf8.ValidString(text) || len(r.Message) > 8*maxShown+64 {
			t.Errorf("%d bytes became %q", len(data), text)
		}
	})
}
