package supervisor

import (
	"os"
	"strings"
	"testing"
	"time"
)

// The limit of a standby begins when the other build is executed, however long the
// one before takes until then.
func TestStandbyAwaitsTheExecution(t *testing.T) {
	const long, short = time.Minute, 20 * time.Millisecond
	for name, test := range map[string]struct {
		does  func(*os.File)
		limit time.Duration
		said  bool
		why   string
	}{
		"serves":         {func(w *os.File) { w.WriteString(executes); w.WriteString(serves) }, long, true, ""},
		"in two moments": {func(w *os.File) { w.WriteString(executes); time.Sleep(time.Millisecond); w.WriteString(serves) }, long, true, ""},
		"slow before":    {func(w *os.File) { time.Sleep(10 * short); w.WriteString(executes + serves) }, short, true, ""},
		"hangs":          {func(w *os.File) { w.WriteString(executes) }, short, false, "it says nothing within 20ms"},
		"ends":           {func(w *os.File) { w.WriteString(executes); w.Close() }, long, false, "it has ended"},
		"never executed": {func(w *os.File) { w.Close() }, long, false, "it has ended"},
	} {
		t.Run(name, func(t *testing.T) {
			r, w, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			defer w.Close()
			go test.does(w)
			said, why := awaitServing(int(r.Fd()), test.limit)
			if said != test.said || !strings.HasPrefix(why, test.why) {
				t.Errorf("it serves: %v, %q; want %v, %q", said, why, test.said, test.why)
			}
		})
	}
}
