package harness

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

// Failpoints is the file that tells a daemon with failpoints (Binaries, MINICRI_BIN) what is to happen at
// which of them.
type Failpoints string

// Option has the daemon read the file.
func (f Failpoints) Option() Option { return Env("MINICRI_FAILPOINTS=" + string(f)) }

// Arm says what is to happen at which points: "POINT ACTION" each.
func (f Failpoints) Arm(t testing.TB, orders ...string) {
	Check(t, IgnoreMissing(os.Remove(string(f)+".hit")))
	var lines strings.Builder
	for _, order := range orders {
		space := strings.LastIndexByte(order, ' ')
		fmt.Fprintf(&lines, "%s\t%s\n", order[:space], order[space+1:])
	}
	Check(t, os.WriteFile(string(f)+".new", []byte(lines.String()), 0o600))
	Check(t, os.Rename(string(f)+".new", string(f)))
}

// Disarm has nothing happen any more.
func (f Failpoints) Disarm(t testing.TB) { Check(t, IgnoreMissing(os.Remove(string(f)))) }

// WasHit reports whether a point was reached since Arm.
func (f Failpoints) WasHit() bool {
	_, err := os.Stat(string(f) + ".hit")
	return err == nil
}
