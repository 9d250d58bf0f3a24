package image

import (
	"fmt"
	"os"
	"testing"

	"github.com/containerd/log"
	"go.uber.org/goleak"
)

// TestMain runs the tests, or, as the child of TestKilledPulls, one pull.
func TestMain(m *testing.M) {
	if err := log.SetLevel("fatal"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if os.Getenv(childRoot) != "" {
		os.Exit(pullAsChild())
	}
	goleak.VerifyTestMain(m)
}
