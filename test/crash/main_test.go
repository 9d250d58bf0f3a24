package crash

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

// TestMain chooses the binaries with failpoints.
func TestMain(m *testing.M) {
	binaries, err := filepath.Abs("../../bin/failpoints")
	if err == nil && os.Getenv("MINICRI_BIN") == "" {
		err = os.Setenv("MINICRI_BIN", binaries)
	}
	if err == nil {
		_, err = os.Stat(filepath.Join(os.Getenv("MINICRI_BIN"), "trip"))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "crash: binaries with failpoints are needed, run 'make failpoints':", err)
		os.Exit(1)
	}
	os.Exit(harness.Main(m))
}
