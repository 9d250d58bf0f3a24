package harness

import (
	"context"
	"fmt"
	"os"
	"testing"

	"github.com/minicri/minicri/test/leak"
)

// Main runs the tests of a package and then looks, once for all, for what
// [Parallel] tests cannot tell apart: namespaces and processes. It returns the
// exit code for os.Exit.
func Main(m *testing.M) int {
	if err := SweepCgroups(); err != nil {
		fmt.Fprintln(os.Stderr, "harness: cgroups of nodes whose test was killed:", err)
	}
	scope := leak.Scope{Namespaces: []string{"net", "user"}, Executables: executables}
	before, err := leak.Take(context.Background(), scope)
	if err != nil {
		fmt.Fprintln(os.Stderr, "harness:", err)
		return 1
	}
	code := m.Run()
	ctx, cancel := context.WithTimeout(context.Background(), settleTime)
	defer cancel()
	leaks, err := leak.Settle(ctx, before, scope)
	for _, l := range leaks {
		fmt.Fprintln(os.Stderr, "harness: left behind by all tests together:", l)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "harness:", err)
	}
	if len(leaks) > 0 || err != nil {
		return 1
	}
	return code
}
