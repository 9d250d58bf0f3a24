package image

import (
	"fmt"
	"os"
	"testing"

	"github.com/containerd/log"
	"go.uber.org/goleak"
)

// TestMain runs the tests, or, as a child of them, one pull or one decoder.
func TestMain(m *testing.M) {
	if IsZstdDecoder() {
		os.Exit(DecodeZstd())
	}
	if err := log.SetLevel("fatal"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if os.Getenv(childRoot) != "" {
		os.Exit(pullAsChild())
	}
	goleak.VerifyTestMain(m)
}
