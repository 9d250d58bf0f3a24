package crash

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

// atOnce is how many nodes are at work, unless -parallel says so: most of the
// time a case waits.
const atOnce = "4"

// TestMain chooses the binaries with failpoints.
func TestMain(m *testing.M) {
	binaries, err := filepath.Abs("../../bin/failpoints")
	if err == nil && os.Getenv("MINICRI_BIN") == "" {
		err = os.Setenv("MINICRI_BIN", binaries)
	}
	if err == nil {
		_, err = os.Stat(filepath.Join(os.Getenv("MINICRI_BIN"), "trip"))
	}
	if err == nil {
		err = flag.Set("test.parallel", atOnce)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "crash: it needs binaries with failpoints, see 'make failpoints':", err)
		os.Exit(1)
	}
	os.Exit(harness.Main(m))
}
